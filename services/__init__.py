"""Ullage's services: a probe and a runner on every node, one master, and the commands people type."""
