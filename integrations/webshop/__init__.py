"""WebShop (Yao et al., 2022) in pure Python, without Java or a server. Pages and rewards are the official ones to the letter.

`data` holds products and goals as tasks, `search` the search engine, `pages` the pages, `reward` what a purchase pays,
`environment` the shop in text, `world` the experiment and its scripted policies.
"""
