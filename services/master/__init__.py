"""The master: a log, a state folded from it, an allocator and a dispatcher. The only writer."""
