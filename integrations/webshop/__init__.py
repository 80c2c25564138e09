"""WebShop (Yao et al., 2022) in pure Python, exact against the official engine."""
