"""Benchmarks behind the speed claims of the documentation, as `lesonnx bench` commands."""
