"""How Linux tells what its memory is doing."""
