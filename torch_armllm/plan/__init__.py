"""Plans: a rewritten graph as a program that runs a whole model step in C++."""
