"""Plans: a rewritten graph as a program that runs a whole step in C++."""
