"""WebShop (Yao et al., 2022) in pure Python: no Java, no server, and the official engine's pages and rewards to the letter.

`data` holds products and goals as tasks, `search` the search engine, `pages` the pages, `reward` what a purchase pays,
`environment` the shop in text, `agent` the same as two tools, `scripted_policies` offline trajectories.
"""
