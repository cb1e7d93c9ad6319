"""Plans that are kept, so that a folder of packed weights is loaded again without its model."""
