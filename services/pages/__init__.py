"""The course as static pages: `python -m services.pages DIR [--run runs/step07_moe_ep]`."""
