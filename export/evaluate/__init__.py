"""How good a bundle is: perplexity, KL to a reference, agreement, and accuracy on tasks, with intervals."""
