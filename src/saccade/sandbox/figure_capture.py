"""Showing pictures from inside a guest: `plt.show()` and its relatives, PIL's, OpenCV's and `display`, end here.

A figure is measured before it is drawn, so that a huge one is drawn smaller instead of filling the memory.
"""

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageShow

MOST_ASPECT = 200  # of a picture that a model can look at
_MOST_SIDE = 2**15  # of a canvas

Hang = Callable[[Image.Image], None]


class Gallery:
    """Catches what is shown and hands it on, once it is open to anybody, as RGB pictures of at most `pixels` pixels."""

    def open_to(self, hang: Hang, pixels: int) -> None:
        """Let `hang` have what is shown."""
        self._hang, self._pixels = hang, pixels

    def hook(self) -> None:
        """Put itself in the place of everything that shows: once, ahead of every fork."""

        def show_all(*args: Any, **kwargs: Any) -> None:
            """Show every open figure, and close it."""
            for number in plt.get_fignums():
                show_one(plt.figure(number))

        def show_one(figure: Figure, *args: Any, **kwargs: Any) -> None:
            """Show this figure, and close it, even if it can't be drawn: it would be in the way of those to come."""
            try:
                self.figure(figure)
            finally:
                plt.close(figure)

        def show_managed(manager: FigureManagerBase) -> None:
            """Show the figure of this window, and close it."""
            show_one(manager.canvas.figure)

        def show_picture(picture: Image.Image, *args: Any, **kwargs: Any) -> None:
            """Show this picture."""
            self.picture(picture)

        def nothing(*args: Any, **kwargs: Any) -> None:
            """Do nothing: there is one backend here."""

        vars(plt).update(show=show_all, switch_backend=nothing)
        vars(matplotlib).update(use=nothing)
        for kind, show in ((Figure, show_one), (FigureManagerBase, show_managed), (Image.Image, show_picture)):
            setattr(kind, "show", show)  # noqa: B010 (for a type checker this is no assignment)
        vars(ImageShow).update(show=show_picture)

        def display(*things: Any, **kwargs: Any) -> None:
            """Show pictures and figures, print anything else: what notebooks have."""
            for thing in things:
                if isinstance(thing, Figure):
                    show_one(thing)
                elif isinstance(thing, Image.Image):
                    self.picture(thing)
                else:
                    sys.stdout.write(f"{thing!r}\n")

        self.display = display
        notebook, part = ModuleType("IPython"), ModuleType("IPython.display")
        vars(part).update(display=display, clear_output=nothing)
        vars(notebook).update(display=part, get_ipython=lambda: None, version_info=(9, 0, 0), __version__="9.0.0")
        sys.modules.update({"IPython": notebook, "IPython.display": part})

    def hook_windows(self, library: ModuleType) -> None:
        """Let OpenCV's windows, which the build for machines without a screen lacks, show what is put into them."""

        def show_array(window: str, array: Any, *args: Any) -> None:
            """Show an array: grey, or blue, green, red."""
            self.picture(from_windows(array))

        def no_key(*args: Any) -> int:
            """Nobody presses one."""
            return -1

        vars(library).update(imshow=show_array, waitKey=no_key, waitKeyEx=no_key, pollKey=no_key)
        names = ("namedWindow", "destroyWindow", "destroyAllWindows", "resizeWindow", "moveWindow", "setWindowTitle")
        vars(library).update(dict.fromkeys(names, no_key))

    def figure(self, figure: Figure) -> None:
        """Draw a figure at its own dots per inch, or at fewer where it would be too large, and show it."""
        width, height = (float(side) for side in figure.get_size_inches())
        wanted = figure.get_dpi()
        if not width * height * wanted > 0:
            self._refuse(width * wanted, height * wanted, "it is empty")
            return
        most = min(math.sqrt(self._pixels / (width * height)), _MOST_SIDE / max(width, height))
        own = figure.canvas
        try:
            if wanted > most:
                self._tell(width * wanted, height * wanted, width * most, height * most)
                figure.set_dpi(most)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()  # type: ignore[no-untyped-call]
            self._frame(Image.fromarray(np.asarray(canvas.buffer_rgba())))  # type: ignore[no-untyped-call]
        finally:
            figure.set_dpi(wanted)
            figure.set_canvas(own)

    def picture(self, picture: Image.Image) -> None:
        """Show a picture of any mode, reduced where it is too large."""
        width, height = picture.size
        if width * height > self._pixels:
            ratio = math.sqrt(self._pixels / (width * height))
            size = max(1, int(width * ratio)), max(1, int(height * ratio))
            self._tell(width, height, *size)
            picture = picture.reduce(max(1, int(0.5 / ratio))) if picture.mode not in ("1", "P", "I;16") else picture
            picture = picture.resize(size)
        self._frame(picture)

    def _frame(self, picture: Image.Image) -> None:
        width, height = picture.size
        if not width * height:
            self._refuse(width, height, "it is empty")
        elif max(width, height) >= MOST_ASPECT * min(width, height):
            self._refuse(width, height, "too narrow")
        else:
            self._hang(rgb(picture))

    def _refuse(self, width: float, height: float, why: str) -> None:
        sys.stdout.write(f"[image of {width:.0f}x{height:.0f} not shown: {why}]\n")

    def _tell(self, width: float, height: float, new_width: float, new_height: float) -> None:
        sizes = f"from {width:.0f}x{height:.0f} to {new_width:.0f}x{new_height:.0f}"
        sys.stdout.write(f"[image reduced {sizes}]\n")


def names() -> dict[str, Any]:
    """What a guest knows of matplotlib without importing it."""
    return {"matplotlib": matplotlib, "plt": plt, "display": GALLERY.display}


GALLERY = Gallery()


def warm_up() -> None:
    """Draw a figure, so that fonts and whatever else is made at first use is there; then hook."""
    plt.plot([0, 1], label="a")
    plt.legend()
    plt.gcf().canvas.draw()
    plt.close("all")
    GALLERY.hook()


def rgb(picture: Image.Image) -> Image.Image:
    """The picture as RGB: transparency over white, numbers beyond 0 to 255 stretched to that range."""
    if picture.mode == "F" or picture.mode.startswith("I"):
        return Image.fromarray(_stretched(np.asarray(picture, dtype=np.float64))).convert("RGB")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        if layer.getchannel("A").getextrema() == (255, 255):  # as figures mostly are
            return layer.convert("RGB")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture.convert("RGB")


def from_windows(array: Any) -> Image.Image:
    """A picture of an array [height, width] or [height, width, blue green red (alpha)] as OpenCV's windows take it.

    Fractions lie between 0 and 1, 16 bits are scaled to 8, and a fourth channel isn't shown.
    """
    pixels = np.asarray(array)
    if pixels.dtype.kind == "f":
        pixels = np.nan_to_num(pixels).clip(0, 1) * 255
    elif pixels.dtype == np.uint16:
        pixels = pixels // 256
    pixels = pixels.astype(np.uint8)
    if pixels.ndim == 3:
        pixels = np.ascontiguousarray(pixels[..., 2::-1]) if pixels.shape[2] > 2 else pixels[..., 0]
    return Image.fromarray(pixels)


def _stretched(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    finite = np.nan_to_num(values, posinf=0.0, neginf=0.0)
    if finite.min() >= 0 and finite.max() <= 255:
        return finite.astype(np.uint8)
    low, high = float(finite.min()), float(finite.max())
    return ((finite - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
