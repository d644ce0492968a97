"""The runner: takes assignments from the master and runs one child process for each shard."""
