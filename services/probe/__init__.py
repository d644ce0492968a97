"""The probe: reads one node's memory and pressure, and streams them to the master."""
