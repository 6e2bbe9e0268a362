"""Tutorial notebooks, shipped as package data."""
