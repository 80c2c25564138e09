"""TextWorld-Express (Jansen and Côté, 2023). `text` alone is pure Python and needs neither the package nor Java."""
