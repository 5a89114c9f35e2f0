"""Capture the images that code in a worker shows: `plt.show()` and its variants, PIL's, OpenCV's and `display`.

A figure is measured before it is drawn, so that a huge one is drawn smaller instead of exhausting memory.
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
from PIL import Image, ImageShow

from saccade.sandbox.limits import TOO_NARROW, format_image_refusal, is_too_narrow

_MAX_CANVAS_SIDE = 2**15  # pixels
_connection: dict[str, Any] = {}  # `send` and `max_pixels` of this worker


def connect(send: Callable[[Image.Image], None], max_pixels: int) -> None:
    """Send everything shown from now on to `send`, as RGB images reduced to at most `max_pixels` pixels each."""
    _connection.update(send=send, max_pixels=max_pixels)


def show_all(*args: Any, **kwargs: Any) -> None:
    """Show and close every open figure."""
    for number in plt.get_fignums():
        show_figure(plt.figure(number))


def show_figure(figure: Figure, *args: Any, **kwargs: Any) -> None:
    """Show this figure and close it, even if drawing fails: left open, it would fail again at the next show."""
    try:
        _draw_figure(figure)
    finally:
        plt.close(figure)


def show_image(image: Image.Image, *args: Any, **kwargs: Any) -> None:
    """Show an image of any mode, reduced if it is too large."""
    width, height = image.size
    max_pixels = _connection["max_pixels"]
    if width * height > max_pixels:
        ratio = math.sqrt(max_pixels / (width * height))
        size = max(1, int(width * ratio)), max(1, int(height * ratio))
        _print_resize(width, height, *size)
        image = image.reduce(max(1, int(0.5 / ratio))) if image.mode not in ("1", "P", "I;16") else image
        image = image.resize(size)
    _check_and_send(image)


def display(*objects: Any, **kwargs: Any) -> None:
    """Show images and figures and print anything else, as notebooks do."""
    for value in objects:
        if isinstance(value, Figure):
            show_figure(value)
        elif isinstance(value, Image.Image):
            show_image(value)
        else:
            sys.stdout.write(f"{value!r}\n")


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: there is only one backend here."""


def warm_up() -> None:
    """Fill the caches of the first use by drawing a figure; then replace every show function, before the first fork."""
    plt.plot([0, 1], label="a")
    plt.legend()
    plt.gcf().canvas.draw()
    plt.close("all")
    vars(plt).update(show=show_all, switch_backend=do_nothing)
    vars(matplotlib).update(use=do_nothing)
    Figure.show = show_figure  # type: ignore[assignment,method-assign]
    FigureManagerBase.show = lambda manager: show_figure(manager.canvas.figure)  # type: ignore[assignment,method-assign]
    Image.Image.show = show_image  # type: ignore[assignment,method-assign]
    vars(ImageShow).update(show=show_image)
    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    vars(module).update(display=display, clear_output=do_nothing)
    vars(package).update(display=module, get_ipython=lambda: None, version_info=(9, 0, 0), __version__="9.0.0")
    sys.modules.update({"IPython": package, "IPython.display": module})


def install_opencv_hooks(library: ModuleType) -> None:
    """Replace OpenCV's window functions, which its headless build lacks: `imshow` shows its image."""
    names = (
        "waitKey waitKeyEx pollKey namedWindow destroyWindow destroyAllWindows resizeWindow moveWindow setWindowTitle"
    )
    vars(library).update(dict.fromkeys(names.split(), lambda *args: -1))  # -1: no key was pressed
    vars(library).update(imshow=lambda window, array, *args: show_image(convert_opencv_array(array)))


def build_namespace() -> dict[str, Any]:
    """Return the variables that code has without importing anything."""
    return {"matplotlib": matplotlib, "plt": plt, "display": display}


def _draw_figure(figure: Figure) -> None:
    """Draw a figure at its own dpi, or at a lower one if it would be too large, and send it."""
    width, height = (float(side) for side in figure.get_size_inches())
    dpi = figure.get_dpi()
    if not width * height * dpi > 0:
        _print_refusal(width * dpi, height * dpi, "it is empty")
        return
    max_dpi = min(math.sqrt(_connection["max_pixels"] / (width * height)), _MAX_CANVAS_SIDE / max(width, height))
    original_canvas = figure.canvas
    try:
        if dpi > max_dpi:
            _print_resize(width * dpi, height * dpi, width * max_dpi, height * max_dpi)
            figure.set_dpi(max_dpi)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # type: ignore[no-untyped-call]
        _check_and_send(Image.fromarray(np.asarray(canvas.buffer_rgba())))  # type: ignore[no-untyped-call]
    finally:
        figure.set_dpi(dpi)
        figure.set_canvas(original_canvas)


def _check_and_send(image: Image.Image) -> None:
    width, height = image.size
    if not width * height:
        _print_refusal(width, height, "it is empty")
    elif is_too_narrow(width, height):
        _print_refusal(width, height, TOO_NARROW)
    else:
        _connection["send"](convert_to_rgb(image))


def _print_refusal(width: float, height: float, reason: str) -> None:
    sys.stdout.write(format_image_refusal(width, height, reason))


def _print_resize(width: float, height: float, new_width: float, new_height: float) -> None:
    sys.stdout.write(f"[image reduced from {width:.0f}x{height:.0f} to {new_width:.0f}x{new_height:.0f}]\n")


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: transparency over white; values beyond 0 to 255 rescaled to that range."""
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0, neginf=0.0)
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 255:
            values = (values - low) / max(high - low, 1e-12) * 255
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        if rgba.getchannel("A").getextrema() == (255, 255):  # opaque, as most figures are
            return rgba.convert("RGB")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def convert_opencv_array(array: Any) -> Image.Image:
    """Convert an array [height, width] or [height, width, BGR(A)] to an image the way OpenCV's windows do.

    Floats range from 0 to 1, 16 bits are scaled to 8, and the alpha channel is ignored.
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
