"""The course as static pages: `python -m extras.services.pages DIR [--run runs/step07_moe_ep]`."""
