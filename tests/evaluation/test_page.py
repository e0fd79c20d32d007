"""The page with its viewer, in a real browser with no network."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from torch import Tensor

from qnmixer.evaluation.page import write_page
from qnmixer.evaluation.pictures import MethodImages, SliceImages
from qnmixer.runs.tables import Table

pytestmark = pytest.mark.xdist_group("browser")  # one browser serves all

H = 16
INFERNO = matplotlib.colormaps["inferno"](range(256), bytes=True)
MAGENTA = [255, 0, 255, 255]
CANVAS = """
const figures = [...document.querySelectorAll("figure")];
const figure = figures.find((figure) => figure.querySelector(".name").textContent === arguments[0]);
const canvas = figure?.querySelector(arguments[1] + ":not([hidden]) canvas");
return canvas && [canvas.width, canvas.height,
  [...canvas.getContext("2d", { willReadFrequently: true }).getImageData(0, 0, canvas.width, canvas.height).data]];
"""


def greys(hu: Tensor, level: float, width: float) -> np.ndarray:
    """RGBA [H, W, 4] of whole HU in a window."""
    grey = np.floor(255 * np.clip((hu.double().numpy() - (level - width / 2)) / width, 0, 1) + 0.5)
    return np.stack([grey, grey, grey, np.full_like(grey, 255)], axis=-1)


def error_colours(hu: Tensor, truth: Tensor, limit: float = 200) -> np.ndarray:
    error = (hu - truth).abs().double().numpy()
    return INFERNO[np.floor(255 * np.clip(error / limit, 0, 1) + 0.5).astype(int)].astype(float)


class Viewer:
    """A page as its reader sees it."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def open(self, page: Path, window: str = "overview") -> None:
        self.browser.get(page.as_uri())
        self.choose("preset", window)

    def __getitem__(self, id_: str) -> WebElement:
        return self.browser.find_element(By.ID, id_)

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.browser.find_elements(By.CSS_SELECTOR, selector)]

    def choose(self, id_: str, option: str) -> None:
        self[id_].find_element(By.XPATH, f"option[contains(., '{option}')][last()]").click()

    def type_in(self, id_: str, text: str) -> None:
        self[id_].send_keys(Keys.CONTROL, "a")
        self[id_].send_keys(text)

    def frame(self, method: str, kind: str = ".image") -> WebElement:
        path = f"//figure[.//*[@class='name']='{method}']//div[contains(@class, '{kind[1:]}')]"
        found = self.browser.find_element(By.XPATH, path)
        self.browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", found)
        return found

    def canvas(self, method: str, kind: str = ".image") -> np.ndarray | None:
        """RGBA [H, W, 4] of a method's image or error map; None where it is hidden."""
        found = self.browser.execute_script(CANVAS, method, kind)
        return None if found is None else np.array(found[2], float).reshape(found[1], found[0], 4)

    def becomes(self, read: Callable[[], object], expected: object) -> None:
        """Wait until what is read is as expected: the page draws at its next frame."""
        deadline = time.monotonic() + 10
        while not np.array_equal(read(), expected) and time.monotonic() < deadline:  # type: ignore[arg-type]
            time.sleep(0.02)
        np.testing.assert_array_equal(read(), expected)  # type: ignore[arg-type]

    def shows(self, method: str, expected: np.ndarray, kind: str = ".image") -> None:
        self.becomes(lambda: self.canvas(method, kind), expected)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        message = "no chromium and chromedriver on PATH (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("QNMIXER_NEED_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync", "window-size=1400,900",
        "host-resolver-rules=MAP * ~NOTFOUND", f"user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, Service(chromedriver))
    driver.get("about:blank")
    driver.get_log("performance")  # the browser's own first page is none of ours
    yield driver
    driver.quit()


@pytest.fixture
def viewer(browser: Chrome) -> Iterator[Viewer]:
    """What no page may do: report an error, or ask for anything but itself."""
    yield Viewer(browser)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.endswith(("/page.html", "about:blank"))] == []
    assert any(url.startswith("file:///") for url in asked)


def image(offset: int, height: int = H, width: int = H) -> Tensor:
    """HU from −1000 to 1000, every pixel another."""
    generator = torch.Generator().manual_seed(offset)
    return torch.randperm(2001, generator=generator)[: height * width].reshape(height, width).float() - 1000


TRUTH, FBP = image(0), image(1)
ITERATES = [FBP, image(2), image(3)]
SHORT = [FBP, image(4)]
OTHER = image(5)
WIDE = image(6, 10, 20)
TAG = "<script>window.injected = 1</script>"
WINDOW = [-160.0, 240.0]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Three slices: one with all kinds of methods, one with an odd name, one of another shape."""
    table = Table(["method", "PSNR, dB"], [["FBP", "20.00 ± 1.00"], [TAG, "not run"]], "test split", "2 images & more")
    methods = [
        MethodImages("FBP", [FBP], "20.00 dB"), MethodImages("QN-Mixer", ITERATES, "34.13 dB / 91.9"),
        MethodImages("short", SHORT), MethodImages(TAG, [OTHER], "30.00 dB"),
    ]  # fmt: skip
    slices = [
        SliceImages("first", TRUTH, methods, WINDOW),
        SliceImages("</script><b>second</b>", OTHER, [MethodImages("FBP", [FBP])], WINDOW),
        SliceImages("wide", WIDE, [MethodImages("FBP", [WIDE])], WINDOW),
    ]
    path = tmp_path / "page.html"
    write_page(path, "A & B", [table, Table(["method"], [["FBP"]], "cost")], slices, "64 views <b>")
    return path


def test_text_stands_as_it_was_given(viewer: Viewer, page: Path) -> None:
    viewer.open(page)
    viewer.becomes(lambda: viewer.texts("figure .name"), ["truth", "FBP", "QN-Mixer", "short", TAG])
    assert viewer.texts("h1, .subtitle") == ["A & B", "64 views <b>"]
    assert viewer.browser.title == "A & B"
    assert viewer.texts("main .table :is(h2, th, td, .note)") == [
        "test split", "method", "PSNR, dB", "FBP", "20.00 ± 1.00", TAG, "not run", "2 images & more",
        "cost", "method", "FBP",
    ]  # fmt: skip
    assert viewer.texts("footer")[0].startswith("Commit: ")
    options = ["1 · first · 30.00 dB", "2 · </script><b>second</b>", "3 · wide"]
    assert viewer.texts("#slice option") == options
    assert viewer.browser.execute_script("return window.injected") is None


def test_pixels_are_the_greys_of_the_window(viewer: Viewer, page: Path) -> None:
    """In every window, and the colours of the error at its scale; the truth comes first and has no error map."""
    viewer.open(page, "soft tissue")
    for method, hu in {"truth": TRUTH, "FBP": FBP, "QN-Mixer": ITERATES[-1], TAG: OTHER}.items():
        viewer.shows(method, greys(hu, 40, 400))
        if method != "truth":
            viewer.shows(method, error_colours(hu, TRUTH), ".error")
    assert viewer.canvas("truth", ".error") is None
    low, high = float(TRUTH.min()), float(TRUTH.max())
    full = ((low + high) / 2, high - low)
    for name, window in {"lung": (-600, 1500), "overview": (-150, 1700), "full": full}.items():
        viewer.choose("preset", name)
        viewer.shows("FBP", greys(FBP, *window))
        assert [float(viewer[key].get_property("value")) for key in ("level", "width")] == list(window)
    viewer.type_in("level", "-20")
    viewer.type_in("width", "333")
    viewer.shows("FBP", greys(FBP, -20, 333))
    assert viewer["preset"].get_property("value") == "-1"
    viewer.type_in("error-limit", "750")
    viewer.shows("FBP", error_colours(FBP, TRUTH, 750), ".error")
    viewer.choose("show", "errors")
    viewer.becomes(lambda: viewer.canvas("FBP") is None, True)


def test_the_slider_goes_through_the_iterates(viewer: Viewer, page: Path) -> None:
    viewer.open(page, "soft tissue")
    viewer.shows("QN-Mixer", greys(ITERATES[2], 40, 400))
    viewer["iterate"].send_keys(Keys.ARROW_LEFT)
    viewer.shows("QN-Mixer", greys(ITERATES[1], 40, 400))
    viewer.shows("QN-Mixer", error_colours(ITERATES[1], TRUTH), ".error")
    viewer.shows("short", greys(SHORT[1], 40, 400))
    assert viewer.texts("#iterate-text") == ["x₁ of x₂"]
    rmse = float((ITERATES[1] - TRUTH).square().mean().sqrt())
    assert viewer.texts("figure .shown")[2] == f"x₁ · RMSE {rmse:.1f} HU"
    assert viewer.texts("figure .caption") == ["", "20.00 dB", "x₂: 34.13 dB / 91.9", "", "30.00 dB"]
    viewer["panels"].send_keys(Keys.ARROW_LEFT)
    viewer.shows("QN-Mixer", greys(FBP, 40, 400))
    viewer["panels"].send_keys(Keys.ARROW_DOWN)
    viewer.shows("truth", greys(OTHER, 40, 400))
    viewer.choose("slice", "wide")  # of another shape
    viewer.shows("FBP", greys(WIDE, 40, 400))


def test_values_under_the_cursor_by_all_methods(viewer: Viewer, page: Path) -> None:
    x = y = H // 2

    def text(hu: Tensor, reference: Tensor | None = TRUTH) -> str:
        value = f"{int(hu[y, x])} HU"
        error = "" if reference is None else f" ({int(hu[y, x] - reference[y, x]):+d})"
        return (value + error).replace("-", "−")

    viewer.open(page)
    viewer.shows("truth", greys(TRUTH, -150, 1700))
    frame, aside = viewer.frame("QN-Mixer"), viewer["where"]
    ActionChains(viewer.browser, 50).move_to_element_with_offset(frame, 2, 2).perform()
    values = [text(TRUTH, None), text(FBP), text(ITERATES[2]), text(SHORT[1]), text(OTHER)]
    viewer.becomes(lambda: viewer.texts("figure .value"), values)
    assert viewer.texts("#where") == [f"column {x}, row {y}"]
    ActionChains(viewer.browser, 50).move_to_element(aside).perform()
    viewer.becomes(lambda: viewer.texts("figure .value"), [""] * 5)
    ActionChains(viewer.browser, 50).move_to_element_with_offset(frame, 2, 2).click().perform()
    ActionChains(viewer.browser, 50).move_to_element(aside).perform()
    viewer.becomes(lambda: viewer.texts("figure .value"), values)
    ActionChains(viewer.browser, 50).move_to_element(frame).click().move_to_element(aside).perform()
    viewer.becomes(lambda: viewer.texts("figure .value"), [""] * 5)


def test_dragging_zooms_all_images_into_a_region(viewer: Viewer, page: Path) -> None:
    viewer.open(page, "soft tissue")
    viewer.shows("truth", greys(TRUTH, 40, 400))
    frame = viewer.frame("FBP", ".error")
    pixel = frame.size["width"] / H
    start = -round(4 * pixel) + 1  # from column 4, row 4 over 8 pixels
    drag = ActionChains(viewer.browser, 50).move_to_element_with_offset(frame, start, start).click_and_hold()
    drag.move_by_offset(round(4 * pixel), 5).move_by_offset(round(4 * pixel), 5).release().perform()
    viewer.shows("FBP", greys(FBP, 40, 400)[4:12, 4:12])
    viewer.shows("QN-Mixer", error_colours(ITERATES[2], TRUTH)[4:12, 4:12], ".error")
    rmse = float((FBP - TRUTH)[4:12, 4:12].square().mean().sqrt())
    assert viewer.texts("figure .shown")[1] == f"RMSE {rmse:.1f} HU"
    ActionChains(viewer.browser, 50).double_click(frame).perform()
    viewer.shows("FBP", greys(FBP, 40, 400))


def test_values_not_finite_or_beyond_int16_are_distinguished(viewer: Viewer, tmp_path: Path) -> None:
    truth = torch.zeros(H, H)
    odd = truth.clone()
    odd[0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e6, -1e6])
    odd[1, :2] = torch.tensor([0.4, -0.6])
    write_page(tmp_path / "page.html", "odd", [], [SliceImages("a", truth, [MethodImages("m", [odd])], WINDOW)])
    viewer.open(tmp_path / "page.html")
    viewer.type_in("level", "0")
    viewer.type_in("width", "2")
    expected = greys(torch.zeros(H, H), 0, 2)
    expected[0, :5, :3] = [MAGENTA[:3]] * 3 + [[255] * 3, [0] * 3]
    expected[1, 1, :3] = 0  # −0.6 is −1
    viewer.shows("m", expected)
    errors = viewer.canvas("m", ".error")
    assert errors[0, :5].tolist() == [MAGENTA] * 3 + [INFERNO[255].tolist()] * 2
    frame = viewer.frame("m")
    corner = 2 - frame.size["width"] // 2
    ActionChains(viewer.browser, 50).move_to_element_with_offset(frame, corner, corner).perform()
    viewer.becomes(lambda: viewer.texts("figure .value"), ["0 HU", "not a number"])
    assert viewer.texts("figure .shown")[1] == "RMSE – HU"
