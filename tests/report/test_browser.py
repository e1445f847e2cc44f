"""A report in a browser: no error, nothing wider than the screen, all figures, readable text."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

import kexpfam
from kexpfam.estimators import ConditionalKernelDensity, GaussianMixtureDensity

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no browser: install Debian's chromium to look at reports"
)

WIDTHS = (1280, 390)
# The lowest contrast of small text in WCAG 2, and the smallest letters (pixels).
CONTRAST, LETTERS = 4.5, 8.0

# The page in frames of several widths, and a script that measures it in each.
LOOK = """<!doctype html><body style="margin: 0">%s<pre id="found">nothing</pre><script>
const shade = colour => colour.match(/[\\d.]+/g).map(Number);
const light = colour => { const [r, g, b] = shade(colour).slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => { const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05); };
const paper = (node, view) => { for (; node; node = node.parentElement) {
  const own = view.getComputedStyle(node).backgroundColor;
  if ((shade(own)[3] ?? 1) > 0.5) return own; } return "rgb(255, 255, 255)"; };
function look(frame) {
  const page = frame.contentDocument, view = frame.contentWindow;
  const svgs = [...page.querySelectorAll("figure svg")];
  const texts = [...page.querySelectorAll("h1, h2, p, td, th, li, pre, figcaption, footer, summary, strong")];
  const scale = svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const letters = svgs.flatMap(svg => [...svg.querySelectorAll("text")].map(text =>
    parseFloat(view.getComputedStyle(text).fontSize) * scale(svg)));
  const inks = svgs.flatMap(svg => [...svg.querySelectorAll("text")].map(text =>
    contrast(view.getComputedStyle(text).fill, paper(svg, view))));
  const large = svg => { const box = svg.getBoundingClientRect();
    return box.width > 150 && box.height > 60; };
  return { width: frame.clientWidth, reach: page.documentElement.scrollWidth,
    background: paper(page.body, view), figures: svgs.filter(large).length,
    letters: Math.min(...letters), contrast: Math.min(...inks, ...texts.filter(one => one.textContent.trim())
      .map(one => contrast(view.getComputedStyle(one).color, paper(one, view)))),
    sizes: Math.min(...texts.map(one => parseFloat(view.getComputedStyle(one).fontSize))) };
}
addEventListener("load", () => document.getElementById("found").textContent =
  JSON.stringify([...document.querySelectorAll("iframe")].map(look)));
</script></body>"""


def table(rows=80):
    rng = np.random.default_rng(0)
    first = rng.normal(size=rows)
    names = [
        "age",
        "a name that is much longer than any column of a page on a telephone would ever be",
        "income ($) & <more>",
    ]
    return pd.DataFrame({name: first + 0.5 * rng.normal(size=rows) for name in names})


def density():
    return GaussianMixtureDensity(random_state=0).fit(table()).report()


def conditional():
    frame = table()
    return (
        ConditionalKernelDensity(condition_width=0.3, width=0.3)
        .fit(frame.iloc[:, :2], frame.iloc[:, 2])
        .report()
    )


def comparison():
    models = [GaussianMixtureDensity(random_state=seed).fit(table()) for seed in range(2)]
    return kexpfam.compare(*models, X=table(50)).page()


PAGES = {"density": density, "conditional": conditional, "comparison": comparison}


@pytest.fixture(scope="module", params=PAGES)
def page(request, tmp_path_factory):
    made, folder = PAGES[request.param](), tmp_path_factory.mktemp(request.param)
    made.save(folder / "report.html")
    frames = "".join(
        f'<iframe src="report.html" width="{width}" height="900" frameborder="0"></iframe>'
        for width in WIDTHS
    )
    (folder / "look.html").write_text(LOOK % frames)
    return folder, made


def seen(folder, *options):
    """Return what is measured in each frame, and what the browser complained of."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
    ]
    command += [
        "--window-size=1700,1000",
        "--virtual-time-budget=10000",
        f"--user-data-dir={folder / 'profile'}",
        *options,
    ]
    done = subprocess.run(
        [*command, "--dump-dom", str(folder / "look.html")], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found[1])), [
        line for line in done.stderr.splitlines() if ":CONSOLE" in line
    ]


@pytest.mark.parametrize(("scheme", "option"), [("light", "1"), ("dark", "0")])
def test_a_page_can_be_read_on_a_desk_and_on_a_phone(page, scheme, option):
    folder, made = page
    looks, complaints = seen(folder, f"--blink-settings=preferredColorScheme={option}")
    assert complaints == []
    assert [look["width"] for look in looks] == list(WIDTHS)
    for look in looks:
        assert look["reach"] <= look["width"], "something is wider than the screen"
        assert look["figures"] == made.html.count("<figure")
        assert look["contrast"] >= CONTRAST and look["letters"] >= LETTERS and look["sizes"] >= 12.0, look
        dark = sum(map(float, re.findall(r"[\d.]+", look["background"])[:3])) < 3 * 64
        assert dark == (scheme == "dark")
