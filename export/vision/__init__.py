"""Pictures: the graph that prepares them and the tower that reads them, as parts of a bundle."""
