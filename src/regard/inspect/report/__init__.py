"""The report: what a user is shown of a model that read a text, in a terminal, a picture, one offline page."""
