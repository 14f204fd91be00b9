"""The style of the figures in docs: colours and marks of the widths, and matplotlib's settings."""

from typing import Any

# A colour for each width, after Okabe, Ito and Tol; told apart with any colour vision, and each width has a marker too.
PALETTE = {8: "#332288", 7: "#CC79A7", 6: "#56B4E9", 5: "#D55E00", 4: "#E69F00", 3: "#117733", 2: "#882255"}
MARKERS = {8: "o", 7: "v", 6: "s", 5: "P", 4: "D", 3: "X", 2: "^"}
INK, GREY = "#1f2328", "#8a9099"
WIDTH = 8.0  # inches; 9 points are then about 13 pixels at the width of a page

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "font.size": 9,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
