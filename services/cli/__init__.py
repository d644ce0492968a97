"""The commands people type, one file for each noun."""
