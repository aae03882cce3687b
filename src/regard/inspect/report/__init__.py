"""The report: the attention of a model on a text or an image, for a terminal, as a picture, or as one offline page."""
