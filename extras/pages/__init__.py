"""The course as static pages: `python -m extras.pages DIR`."""
