"""The colors and the look that the figures of all chapters share."""

import matplotlib.pyplot as plt
from cycler import cycler

# Okabe and Ito's palette: distinct for the color-blind, in print and on a screen.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")

# One meaning a color, in every chapter.
COLORS = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "weight": "#009E73",
    "communication": "#CC79A7",
    "idle": "#BBBBBB",
}


def use_style() -> None:
    """Set matplotlib to the book's look: white card, thin frame, our palette."""
    plt.rcParams.update(
        {
            "figure.figsize": (7, 3),
            "figure.dpi": 100,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "savefig.facecolor": "white",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=PALETTE),
            "axes.titlesize": 11,
            "legend.frameon": False,
            "image.cmap": "cividis",
        }
    )
