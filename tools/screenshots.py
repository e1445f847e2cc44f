"""Makes the pictures of the README, small ones: a report as Chromium shows it, and a pair plot.

``make screenshots`` runs it. It needs pandas, which is in the extra ``data``, and a chromium on the path.
"""

import io
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from kexpfam import ConditionalKernelExpFamily, KernelExpFamily

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
    stream = io.BytesIO()
    wine().savefig(stream, format="png", dpi=100)
    save(Image.open(stream), "pairs.png", 640)


def cells(page: Path) -> None:
    """Write the report of one measurement of cell nuclei given three others, with a held-out fifth."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer(as_frame=True).frame
    X, y = table[["mean radius", "mean texture", "mean smoothness"]], table["worst area"]
    held_out = np.arange(len(y)) % 5 == 0
    model = ConditionalKernelExpFamily(effort="fast", random_state=0).fit(X[~held_out], y[~held_out])
    model.report(page, X[held_out], y[held_out])


def wine() -> object:
    """Return the pair plot of four columns of the wines that scikit-learn brings along."""
    from sklearn.datasets import load_wine

    table = load_wine(as_frame=True).frame[["alcohol", "flavanoids", "color_intensity", "proline"]]
    return KernelExpFamily(effort="fast", random_state=0).fit(table).plot()


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
    """Write a picture in this width and few colours."""
    picture = picture.convert("RGB").resize(
        (width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS
    )
    few = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    main()
