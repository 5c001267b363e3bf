"""The expert kernel: its C sources, and the library built from them."""
