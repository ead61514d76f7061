"""One page that holds an answer: a table that sorts, pictures, where figures come from. It asks nothing of any network.

Modules: `markup` (escaping), `figure` (plain SVG), `ranked`, `frontier`, `bars`, `seating`, `facts` (its parts),
`style` and `script` (what browsers run), `document` (the whole).
"""
