"""Benchmarks: each is a command, none is a timed test."""
