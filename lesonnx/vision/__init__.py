"""Pictures: decoding, how they are cut, what stands for them in a prompt, where their tokens are; docs/bundle.md."""
