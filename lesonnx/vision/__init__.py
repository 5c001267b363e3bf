"""Pictures: decoding, how they are cut, what stands for them in a prompt and where their tokens are; see docs/bundle.md."""
