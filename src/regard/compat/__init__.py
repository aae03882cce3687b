"""Functions and layers with the names and arguments of other libraries. `import regard` loads none of these modules."""
