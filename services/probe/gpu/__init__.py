"""Graphics processors, and whose their memory is."""
