"""How Windows says what its memory is used for. Not run on hardware: PLATFORMS.md says what was tested on what."""
