"""Figures that are measured, each beside a named floor or peer run in the same minute."""
