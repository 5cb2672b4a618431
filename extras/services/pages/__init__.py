"""The course as static pages: `python -m extras.services.pages DIR`."""
