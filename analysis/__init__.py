"""What people look at: the verdict in words, grids and pictures of pages."""
