"""Cross-sections that resemble a body, and plain ellipses, painted on a canvas.

HU of tissues: air −1000, lung −870 … −720, fat −120 … −80, soft 0 … 80, contrast 150 … 350, bone 300 … 1500. The front
of a body is up.
"""

import numpy as np

from qnmixer.data.phantoms.canvas import BoolArray, Canvas, smooth_field
from qnmixer.physics.units import FloatArray


def _bone(
    c: Canvas, x: float, y: float, a: float, b: float, *, angle: float = 0.0, shell: float = 0.01, wobble: float = 0.0
) -> None:
    """Paint a bone: a cortical shell around a softer inside."""
    c.ellipse(x, y, a, b, c.uniform(500, 1300), angle=angle, wobble=wobble)
    if min(a, b) > 1.5 * shell:
        c.ellipse(x, y, a - shell, b - shell, c.uniform(120, 380), angle=angle, wobble=wobble)


def _spine(c: Canvas, y: float, size: float) -> None:
    """Paint a vertebra at the midline, with its canal and its processes behind it."""
    for side in (-1, 1):
        _bone(c, side * size * 0.62, y + size * 0.95, size * 0.22, size * 0.5, angle=-side * 0.5, shell=0.008)
        lean = side * c.uniform(-0.1, 0.4)
        _bone(c, side * size * 1.3, y + size * 1.25, size * 0.8, size * 0.18, angle=lean, shell=0.008)
        _bone(c, side * size * 0.45, y + size * 1.65, size * 0.65, size * 0.2, angle=-side * 0.6, shell=0.008)
    _bone(c, 0, y + size * 2.3, size * 0.17, size * c.uniform(0.45, 0.8), shell=0.008)
    c.ellipse(0, y, size, size * 0.78, c.uniform(400, 900), square=0.3)
    c.ellipse(0, y, size - 0.011, size * 0.78 - 0.011, c.uniform(130, 300), square=0.3)
    c.ellipse(0, y + size * 1.12, size * 0.48, size * 0.4, c.uniform(-20, 30))
    c.ellipse(0, y + size * 1.12, size * 0.3, size * 0.24, c.uniform(30, 50))


def _torso(c: Canvas, a: float, b: float) -> tuple[float, float, float]:
    """Paint skin, fat and muscle of a trunk with half axes a, b.

    Returns the half axes inside the muscle, and the y of its centre.
    """
    square = c.uniform(0.1, 0.6)
    fat = c.uniform(0.015, 0.06) if c.chance(0.6) else c.uniform(0.06, 0.2) * b
    muscle = c.uniform(0.02, 0.06)
    c.ellipse(0, 0, a, b, c.uniform(-10, 50), square=square)
    c.ellipse(0, 0, a - 0.01, b - 0.01, c.uniform(-115, -85), square=square)
    front = c.uniform(-0.3, 0.6) * fat
    a1, b1 = a - 0.01 - fat, b - 0.01 - fat
    c.ellipse(0, front * 0.5, a1, b1, c.uniform(35, 70), square=square, wobble=0.04)
    return a1 - muscle, b1 - muscle, front * 0.5


def _ribs(c: Canvas, a: float, b: float, y: float, *, spread: tuple[float, float] = (0.15, 0.95)) -> None:
    """Paint ribs cut at an angle, on both sides along the ellipse a, b. `spread`: part of each half turn with ribs."""
    count = int(c.rng.integers(5, 9))
    for side in (-1, 1):
        for k in range(count):
            if c.chance(0.12):
                continue
            t = np.pi * (spread[0] + (spread[1] - spread[0]) * (k + c.uniform(0.2, 0.8)) / count)
            px, py = side * a * np.sin(t), y - b * np.cos(t)
            tangent = float(np.arctan2(b * np.sin(t), side * a * np.cos(t)))
            _bone(c, px, py, c.uniform(0.025, 0.075), c.uniform(0.014, 0.021), angle=tangent, shell=0.007)


def _lung_texture(c: Canvas, lungs: BoolArray) -> None:
    """Add vessels and some haze to the lungs, in place.

    Vessels are ridges of smooth fields, and dots where they cross the plane.
    """
    if not lungs.any():
        return
    coarse, fine = smooth_field(c.rng, 10, c.n), smooth_field(c.rng, 26, c.n)
    c.hu += (c.uniform(10, 50) * coarse + c.uniform(5, 25) * fine) * lungs
    where = np.abs(coarse + np.float32(0.35) * fine) < c.uniform(0.015, 0.045) + np.float32(0.04) * (fine > 0.6)
    c.hu[lungs & where & (fine > -0.3)] = c.uniform(-350, 0)
    grain = smooth_field(c.rng, 44, c.n)
    dots = fine + np.float32(0.5) * grain
    c.hu[lungs & (np.abs(dots) < c.uniform(0.03, 0.09)) & (grain > 0.2)] = c.uniform(-600, -250)
    c.hu[lungs & (dots > c.uniform(2.0, 2.7))] = c.uniform(-200, 60)


def _lungs(c: Canvas, a: float, b: float, y: float, *, size: float = 1.0) -> BoolArray:
    """Paint two lungs inside the cavity a, b. Returns their mask."""
    cavity = c.ellipse(0, y, a, b, c.uniform(-100, -60), square=0.25)
    c.ellipse(0, y + 0.2 * b, 0.45 * a, 0.8 * b, c.uniform(-90, 50), wobble=0.1)
    lungs = np.zeros((c.n, c.n), bool)
    value = c.uniform(-880, -760)
    for side in (-1, 1):
        half = size * a * c.uniform(0.4, 0.5)
        middle, height = y + b * c.uniform(-0.1, 0.1), size * b * c.uniform(0.82, 1.05)
        lungs |= c.ellipse(
            side * (a - half + 0.01), middle, half, height, value + c.uniform(-15, 15),
            angle=side * c.uniform(-0.05, 0.25), square=0.3, wobble=0.1, within=cavity,
        )  # fmt: skip
    _lung_texture(c, lungs)
    return lungs


def _vessel(c: Canvas, x: float, y: float, radius: float, value: float, *, calcified: float = 0.15) -> None:
    """Paint the cross-section of a vessel, sometimes with a calcified spot in its wall."""
    c.ellipse(x, y, radius, radius * c.uniform(0.8, 1.1), value)
    if c.chance(calcified):
        t = c.uniform(0, 2 * np.pi)
        wall = x + radius * np.cos(t), y + radius * np.sin(t)
        c.ellipse(*wall, 0.012, 0.006, c.uniform(400, 1100), angle=t + np.pi / 2)


def _chest(c: Canvas) -> None:
    """Paint a chest: ribs, lungs with vessels, heart or great vessels, spine, sternum, shoulder blades."""
    a = c.uniform(0.72, 0.92)
    ai, bi, y = _torso(c, a, a * c.uniform(0.58, 0.76))
    _ribs(c, ai + 0.01, bi + 0.01, y)
    lungs = _lungs(c, ai - 0.015, bi - 0.015, y)
    blood = c.uniform(150, 380) if c.chance(0.5) else c.uniform(35, 60)
    if c.chance(0.6):
        heart = (c.uniform(0.0, 0.12), y - bi * c.uniform(0.15, 0.35))
        size, lean = c.uniform(0.2, 0.3), c.uniform(0.2, 0.8)
        c.ellipse(*heart, size * 1.1, size * 0.9, c.uniform(40, 80), angle=lean, wobble=0.06)
        for _ in range(int(c.rng.integers(2, 5))):
            dx, dy = c.uniform(-0.45, 0.45) * size, c.uniform(-0.45, 0.45) * size
            c.ellipse(heart[0] + dx, heart[1] + dy, size * 0.35, size * 0.25, blood * c.uniform(0.7, 1), angle=lean)
    else:
        _vessel(c, c.uniform(-0.1, 0.0), y - bi * 0.35, c.uniform(0.06, 0.09), blood)
        x, width = c.uniform(0.0, 0.1), c.uniform(0.1, 0.18)
        c.ellipse(x, y - bi * 0.2, width, 0.05, blood * 0.95, angle=c.uniform(-0.6, 0.6))
        _vessel(c, -0.13, y - bi * 0.3, 0.035, blood * c.uniform(0.8, 1.3))
        if c.chance(0.7):
            c.ellipse(0, y - bi * 0.05, c.uniform(0.03, 0.05), c.uniform(0.03, 0.05), -980)
    for side in (-1, 1):
        if c.chance(0.6):
            c.ellipse(side * c.uniform(0.08, 0.16), y, c.uniform(0.02, 0.035), 0.025, -970, angle=c.uniform(0, 3))
        for _ in range(int(c.rng.integers(1, 5))):
            hx, hy = side * c.uniform(0.12, 0.3), y + c.uniform(-0.15, 0.2)
            c.ellipse(hx, hy, c.uniform(0.03, 0.08), c.uniform(0.012, 0.025), blood * 0.9, angle=c.uniform(0, 3))
    _spine(c, y + bi * c.uniform(0.6, 0.7), c.uniform(0.085, 0.11))
    _vessel(c, c.uniform(0.1, 0.15), y + bi * 0.5, c.uniform(0.04, 0.06), blood)
    _bone(c, 0, y - bi - 0.01, c.uniform(0.06, 0.12), c.uniform(0.018, 0.03), shell=0.007)
    if c.chance(0.45):
        for side in (-1, 1):
            x, lean = side * ai * c.uniform(0.68, 0.8), -side * c.uniform(0.4, 0.9)
            _bone(c, x, y + bi * 0.82, c.uniform(0.1, 0.2), c.uniform(0.012, 0.02), angle=lean, shell=0.007)
    _lung_findings(c, lungs, ai, bi, y)


def _lung_findings(c: Canvas, lungs: BoolArray, a: float, b: float, y: float) -> None:
    """Paint nodules, consolidations and fluid in some of the lungs."""
    for _ in range(int(c.rng.poisson(0.8))):
        radius = c.uniform(0.008, 0.04)
        c.ellipse(c.uniform(-a, a), y + c.uniform(-b, b), radius, radius, c.uniform(-100, 60), wobble=0.2, within=lungs)
    if c.chance(0.25):
        side = float(c.rng.choice([-1, 1]))
        value, size = c.uniform(-500, 40), c.uniform(0.1, 0.3)
        c.ellipse(side * a * 0.6, y + b * c.uniform(0, 0.7), size, size, value, wobble=0.7, within=lungs)
    if c.chance(0.15):
        side = float(c.rng.choice([-1, 1]))
        c.ellipse(side * a * 0.55, y + b * 0.85, a * 0.45, b * 0.3, c.uniform(-5, 35), wobble=0.1, within=lungs)


def _bowel(c: Canvas, x: float, y: float, radius: float) -> None:
    """Paint a bowel loop: its wall, and gas, fluid, contrast or stool inside."""
    b, angle = radius * c.uniform(0.55, 1.0), c.uniform(0, np.pi)
    c.ellipse(x, y, radius, b, c.uniform(20, 90), angle=angle, wobble=0.15)
    wall = c.uniform(0.007, 0.014)
    if min(radius, b) <= 2 * wall:
        return
    kind = c.rng.random()
    content = -950.0 if kind < 0.25 else c.uniform(100, 350) if kind < 0.4 else c.uniform(0, 45)
    inside = c.ellipse(x, y, radius - wall, b - wall, content, angle=angle, wobble=0.15)
    if kind > 0.75:  # gas above, as it rises to the front; or stool, full of bubbles
        stool = c.chance(0.4)
        above = c.wobbles > 0.2 if stool else c.y < y + c.uniform(-0.5, 0.5) * b
        c.hu[inside & above] = c.uniform(-700, -200) if stool else -950


def _kidney(c: Canvas, side: int, y: float) -> None:
    """Paint a kidney. Its sinus opens towards the midline."""
    x, size, lean = side * c.uniform(0.28, 0.38), c.uniform(0.085, 0.125), side * c.uniform(0.1, 0.8)
    cortex = c.uniform(120, 260) if c.chance(0.6) else c.uniform(25, 45)
    c.ellipse(x, y, size * 0.85, size * 1.15, cortex, angle=lean, wobble=0.08)
    c.ellipse(x - side * 0.3 * size, y, size * 0.45, size * 0.6, cortex * c.uniform(0.6, 0.9), angle=lean, wobble=0.3)
    c.ellipse(x - side * 0.5 * size, y, size * 0.4, size * 0.35, c.uniform(-110, -60), angle=lean, wobble=0.2)
    if c.chance(0.3):
        c.ellipse(x - side * 0.3 * size, y, size * 0.12, size * 0.2, c.uniform(0, 400), angle=lean)
    if c.chance(0.2):
        c.ellipse(x + side * 0.6 * size, y, size * 0.3, size * 0.3, c.uniform(-5, 15))


def _liver(c: Canvas, a: float, b: float, y: float, inside: BoolArray) -> None:
    """Paint a liver with vessels and low-contrast lesions, in the left half of the picture."""
    value = c.uniform(45, 125)
    size = c.uniform(0.45, 0.7)
    liver = c.ellipse(
        -a * (1 - size * 0.92), y - b * c.uniform(0, 0.2), a * size, b * c.uniform(0.6, 0.85), value,
        angle=c.uniform(-0.25, 0.25), wobble=0.18, square=0.2, within=inside,
    )  # fmt: skip
    for _ in range(int(c.rng.integers(3, 14))):
        x, yy, angle = -a * c.uniform(0.05, 0.9), y + b * c.uniform(-0.6, 0.5), c.uniform(0, np.pi)
        length = c.uniform(0.012, 0.12)
        contrast = c.uniform(-15, 60)
        c.ellipse(x, yy, length, c.uniform(0.006, 0.018), value + contrast, angle=angle, wobble=0.1, within=liver)
    for _ in range(int(c.rng.poisson(1.2))):
        radius = c.uniform(0.015, 0.08)
        x, yy = -a * c.uniform(0.1, 0.9), y + b * c.uniform(-0.6, 0.5)
        c.ellipse(x, yy, radius, radius, value + c.uniform(-60, 40), wobble=0.2, within=liver)


def _abdomen(c: Canvas) -> None:
    """Paint an abdomen: liver, spleen, kidneys, stomach, bowel, vessels, spine, psoas; maybe ribs and lung bases."""
    a = c.uniform(0.62, 0.92)
    ai, bi, y = _torso(c, a, a * c.uniform(0.6, 0.82))
    upper = c.chance(0.6)
    if upper:
        _ribs(c, ai + 0.012, bi + 0.012, y, spread=(0.35, 0.95))
    inside = c.ellipse(0, y, ai, bi, c.uniform(-115, -90), square=0.25, wobble=0.04)
    if upper and c.chance(0.4):
        _lungs(c, ai, bi, y + 0.05, size=c.uniform(0.85, 1.05))
        size = ai * c.uniform(0.85, 0.97), bi * c.uniform(0.7, 0.9)
        c.ellipse(0, y - 0.08, *size, c.uniform(-100, -85), within=inside)
    spine = y + bi * c.uniform(0.52, 0.66)
    blood = c.uniform(120, 330) if c.chance(0.6) else c.uniform(35, 55)
    for side in (-1, 1):
        c.ellipse(side * c.uniform(0.3, 0.4), spine + 0.2, 0.22, 0.12, c.uniform(40, 65), wobble=0.2, within=inside)
    if upper:
        _liver(c, ai, bi, y, inside)
        c.ellipse(
            ai * c.uniform(0.68, 0.78), y + bi * c.uniform(0.1, 0.35), 0.15, c.uniform(0.16, 0.25), c.uniform(50, 130),
            angle=c.uniform(-0.6, 0.1), wobble=0.15, within=inside,
        )  # fmt: skip
        _bowel(c, ai * c.uniform(0.25, 0.55), y - bi * c.uniform(0.2, 0.5), c.uniform(0.12, 0.22))
    for _ in range(int(c.rng.integers(3, 8) if upper else c.rng.integers(8, 18))):
        angle, reach = c.uniform(-1.5, 1.5), c.uniform(0.2, 0.85)
        x, yy = ai * reach * np.sin(angle), y + 0.05 - bi * reach * np.cos(angle)
        if not upper or x > -0.1:
            _bowel(c, x, yy, c.uniform(0.04, 0.11))
    if c.chance(0.7):
        for side in (-1, 1):
            c.ellipse(side * 0.17, spine + 0.03, 0.06, c.uniform(0.05, 0.11), c.uniform(45, 65), wobble=0.1)
            if c.chance(0.9):
                _kidney(c, side, spine - c.uniform(-0.05, 0.12))
    c.ellipse(0.1, spine - 0.25, c.uniform(0.1, 0.22), 0.04, c.uniform(40, 110), angle=c.uniform(-0.6, 0.3), wobble=0.3)
    _spine(c, spine, c.uniform(0.09, 0.12))
    _vessel(c, 0.04, spine - 0.15, c.uniform(0.035, 0.055), blood, calcified=0.4)
    _vessel(c, -0.08, spine - 0.14, c.uniform(0.035, 0.055), blood * c.uniform(0.6, 1.0))
    for _ in range(int(c.rng.integers(3, 12))):
        radius = c.uniform(0.006, 0.018)
        c.ellipse(c.uniform(-0.4, 0.4), y + c.uniform(-0.4, 0.2), radius, radius, blood * c.uniform(0.5, 1))


def _pelvis(c: Canvas) -> None:
    """Paint a pelvis: hip bones or femoral heads, sacrum, bladder, bowel, gluteal muscles."""
    a = c.uniform(0.7, 0.92)
    ai, bi, y = _torso(c, a, a * c.uniform(0.55, 0.7))
    inside = c.ellipse(0, y, ai, bi, c.uniform(-110, -90), square=0.4)
    for side in (-1, 1):
        for x, yy, w, h in ((0.55, 0.4, 0.25, 0.2), (0.62, -0.1, 0.16, 0.22), (0.25, -0.75, 0.1, 0.06)):
            value, lean = c.uniform(45, 65), side * c.uniform(-0.6, 0.2)
            c.ellipse(side * ai * x, y + bi * yy, w, h, value, angle=lean, wobble=0.2, within=inside)
    c.ellipse(0, y - bi * 0.2, ai * 0.45, bi * 0.6, c.uniform(-105, -90), wobble=0.1)
    if c.chance(0.5):
        for side in (-1, 1):
            lean = -side * c.uniform(0.7, 1.1)
            _bone(c, side * ai * 0.58, y + bi * 0.05, c.uniform(0.2, 0.3), 0.035, angle=lean, shell=0.014, wobble=0.1)
        _bone(c, 0, y + bi * 0.55, c.uniform(0.16, 0.24), c.uniform(0.08, 0.12), shell=0.01, wobble=0.15)
    else:
        for side in (-1, 1):
            x = side * ai * c.uniform(0.52, 0.6)
            _bone(c, x - side * 0.09, y + 0.02, 0.04, 0.17, angle=side * 0.3, shell=0.012)
            c.ellipse(x, y, 0.11, 0.11, c.uniform(-60, 50))
            _bone(c, x, y, 0.1, 0.1, shell=0.012)
            _bone(c, x + side * 0.14, y + 0.07, 0.07, 0.06, shell=0.012)
        _bone(c, 0, y + bi * 0.75, 0.07, 0.035)
    if c.chance(0.7):
        filling = c.uniform(-5, 20) if c.chance(0.8) else c.uniform(100, 400)
        c.ellipse(0, y - bi * 0.15, c.uniform(0.12, 0.24), c.uniform(0.1, 0.18), filling, wobble=0.08)
    for _ in range(int(c.rng.integers(3, 10))):
        _bowel(c, c.uniform(-0.25, 0.25), y + bi * c.uniform(-0.7, 0.35), c.uniform(0.03, 0.08))
    for side in (-1, 1):
        _vessel(c, side * c.uniform(0.25, 0.35), y - bi * 0.6, 0.025, c.uniform(40, 250))


def _shoulders(c: Canvas) -> None:
    """Paint a slice through the shoulders: arm bones and shoulder blades, windpipe, spine, sometimes lung tips."""
    a = c.uniform(0.85, 1.05)
    ai, bi, y = _torso(c, a, a * c.uniform(0.32, 0.45))
    for _ in range(int(c.rng.integers(8, 18))):
        x, yy, size = c.uniform(-ai, ai) * 0.8, y + c.uniform(-bi, bi) * 0.7, c.uniform(0.04, 0.14)
        value = c.uniform(-110, -70) if c.chance(0.5) else c.uniform(40, 70)
        c.ellipse(x, yy, size, size * c.uniform(0.2, 0.6), value, angle=c.uniform(-0.7, 0.7), wobble=0.3)
    if c.chance(0.5):
        for side in (-1, 1):
            lung = c.ellipse(side * 0.25, y + 0.05, c.uniform(0.08, 0.18), c.uniform(0.1, 0.18), -850, wobble=0.1)
            _lung_texture(c, lung)
    for side in (-1, 1):
        x = side * ai * c.uniform(0.72, 0.85)
        _bone(c, x, y - 0.02, c.uniform(0.08, 0.11), c.uniform(0.08, 0.11), shell=0.012)
        _bone(c, x - side * 0.18, y + 0.1, c.uniform(0.12, 0.2), 0.025, angle=side * c.uniform(-0.9, -0.2), wobble=0.1)
        if c.chance(0.6):
            _bone(c, side * c.uniform(0.25, 0.5), y - bi * 0.6, c.uniform(0.08, 0.2), 0.025, angle=side * 0.4)
        for _ in range(3):
            _vessel(c, side * c.uniform(0.06, 0.2), y - c.uniform(0, 0.15), c.uniform(0.012, 0.03), c.uniform(40, 350))
    _spine(c, y + 0.12, c.uniform(0.06, 0.08))
    c.ellipse(c.uniform(-0.03, 0.03), y - 0.1, c.uniform(0.035, 0.06), c.uniform(0.035, 0.06), -990)


def _brain(c: Canvas, a: float, b: float, y: float) -> None:
    """Paint grey and white matter, furrows, ventricles, the midline, and sometimes a bleeding or a calcification."""
    brain = c.ellipse(0, y, a, b, c.uniform(32, 42))
    folds = np.abs(smooth_field(c.rng, 22, c.n))
    rim = brain & (c.y**2 / b**2 + c.x**2 / a**2 > c.uniform(0.5, 0.75))
    c.hu[rim & (folds < 0.12)] = c.uniform(5, 15)
    c.ellipse(0, y, a * 0.75, b * 0.78, c.uniform(22, 30), wobble=0.35)
    if c.chance(0.7):
        for side in (-1, 1):
            c.ellipse(side * 0.07, y, c.uniform(0.02, 0.06), c.uniform(0.08, 0.2), c.uniform(3, 14), angle=side * 0.25)
    if c.chance(0.5):
        c.ellipse(0, y - b * 0.7, 0.004, b * 0.28, c.uniform(45, 65))
    for _ in range(int(c.rng.poisson(0.6))):
        radius, value = c.uniform(0.02, 0.1), c.uniform(55, 85) if c.chance(0.5) else c.uniform(8, 22)
        c.ellipse(c.uniform(-a, a) * 0.6, y + c.uniform(-b, b) * 0.6, radius, radius, value, wobble=0.3)


def _face(c: Canvas, a: float, b: float) -> None:
    """Paint the base of the skull: sinuses, nose, eyes, petrous bone with air cells, jaw joints."""
    for side in (-1, 1):
        lean = side * c.uniform(0.3, 0.8)
        x, y = side * a * c.uniform(0.6, 0.75), b * c.uniform(0.1, 0.3)
        size = c.uniform(0.1, 0.18), c.uniform(0.06, 0.1)
        bone = c.ellipse(x, y, *size, c.uniform(700, 1400), angle=lean, wobble=0.3)
        cells = smooth_field(c.rng, 48, c.n)
        c.hu[bone & (cells > c.uniform(0.3, 0.9))] = c.uniform(-950, -500)
        c.ellipse(side * a * 0.45, -b * 0.62, 0.12, 0.1, c.uniform(-95, -60))
        c.ellipse(side * a * 0.45, -b * 0.66, 0.09, 0.09, c.uniform(5, 25))
        value, lean = c.uniform(400, 900), side * c.uniform(0.7, 1.2)
        c.ellipse(side * a * 0.3, -b * 0.25, 0.17, 0.016, value, angle=lean, wobble=0.2)
    for _ in range(int(c.rng.integers(2, 6))):
        x, y = c.uniform(-0.2, 0.2), -b * c.uniform(0.35, 0.95)
        w, h = c.uniform(0.03, 0.12), c.uniform(0.03, 0.1)
        c.ellipse(x, y, w + 0.012, h + 0.012, c.uniform(300, 900), wobble=0.15)
        c.ellipse(x, y, w, h, -990 if c.chance(0.7) else c.uniform(10, 40), wobble=0.15)
    _bone(c, 0, b * c.uniform(-0.1, 0.1), c.uniform(0.06, 0.14), c.uniform(0.05, 0.09), wobble=0.2)


def _head(c: Canvas) -> None:
    """Paint a head: scalp, two-layered skull and brain; or the base of the skull with its air spaces."""
    a = c.uniform(0.55, 0.78)
    b = a * c.uniform(1.1, 1.3)
    scalp, skull = c.uniform(0.02, 0.05), c.uniform(0.02, 0.05)
    if c.chance(0.5):
        for side in (-1, 1):
            c.ellipse(side * (a + 0.01), 0.05, 0.04, 0.1, c.uniform(-80, 20), angle=side * 0.3, wobble=0.3)
    c.ellipse(0, 0, a, b, c.uniform(0, 50), square=0.1)
    c.ellipse(0, 0, a - 0.012, b - 0.012, c.uniform(-90, 20), square=0.1)
    bone, brain = (a - scalp, b - scalp), (a - scalp - skull, b - scalp - skull)
    c.ellipse(0, 0, *bone, c.uniform(1000, 1600), square=0.1)
    if c.chance(0.6):
        c.ellipse(0, 0, bone[0] - skull * 0.35, bone[1] - skull * 0.35, c.uniform(400, 800), square=0.1, wobble=0.02)
        c.ellipse(0, 0, brain[0] + skull * 0.3, brain[1] + skull * 0.3, c.uniform(1000, 1600), square=0.1)
    c.ellipse(0, 0, *brain, c.uniform(0, 15), square=0.1, wobble=0.03)
    _brain(c, brain[0] - 0.008, brain[1] - 0.008, 0)
    if c.chance(0.5):
        _face(c, *brain)


def _ellipses(c: Canvas) -> None:
    """Paint ellipses of any size and value inside one large ellipse. Tomography codes are often tried on these."""
    a, b = c.uniform(0.5, 0.95), c.uniform(0.4, 0.95)
    base = c.uniform(-200, 120)
    inside = c.ellipse(0, 0, a, b, base, square=c.uniform(0, 0.5))
    for _ in range(int(c.rng.integers(5, 28))):
        size = float(np.exp(c.uniform(np.log(0.02), np.log(0.5))))
        kind = c.rng.random()
        value = c.uniform(-1000, -700) if kind < 0.2 else c.uniform(300, 1500) if kind < 0.35 else c.uniform(-150, 300)
        c.ellipse(
            c.uniform(-a, a), c.uniform(-b, b), size, size * c.uniform(0.15, 1), value,
            angle=c.uniform(0, np.pi), within=inside,
        )  # fmt: skip


def _arms(c: Canvas) -> None:
    """Paint two arms beside the trunk, partly outside the picture."""
    y = c.uniform(0.1, 0.4)
    for side in (-1, 1):
        x, size = side * c.uniform(0.9, 1.05), c.uniform(0.13, 0.2)
        c.ellipse(x, y, size, size * c.uniform(0.9, 1.3), c.uniform(-5, 40))
        c.ellipse(x, y, size - 0.01, size - 0.01, c.uniform(-110, -85))
        c.ellipse(x, y, size - 0.03, size - 0.035, c.uniform(40, 65), wobble=0.2)
        c.ellipse(x, y, 0.06, 0.055, c.uniform(900, 1400), angle=c.uniform(0, 3))
        c.ellipse(x, y, 0.035, 0.03, c.uniform(-40, 150), angle=c.uniform(0, 3))


def _table(c: Canvas) -> None:
    """Paint the table under the body: one or two curved shells of a few pixels, and a mat or clothes as faint lines."""
    top, curve = c.uniform(0.62, 0.85), c.uniform(-0.35, 0.12)
    width, shell, value = c.uniform(0.6, 1.0), c.uniform(0.004, 0.012), c.uniform(-350, 300)
    curved = c.axis[:, None] - (np.float32(top) + np.float32(curve) * c.axis[None, :] ** 2)
    reach = np.abs(c.axis)[None, :] < width
    gap = c.uniform(0.06, 0.16)
    empty = c.hu < -990
    c.hu[empty & reach & (curved > 0) & (curved < gap)] = c.uniform(-990, -900)
    for offset in (0.0, gap):
        c.hu[empty & reach & (np.abs(curved - np.float32(offset)) < shell)] = value
    if c.chance(0.5):
        c.hu[(c.hu < -990) & reach & (np.abs(curved + np.float32(0.04)) < 0.006)] = c.uniform(-950, -750)


def _tissue(c: Canvas) -> None:
    """Add uneven tissue, fat between muscles and trabeculae in bone, in place."""
    slow, fast = smooth_field(c.rng, 14, c.n), smooth_field(c.rng, 40, c.n)
    soft = (c.hu > -150) & (c.hu < 200)
    c.hu[soft & (c.hu > 34) & (c.hu < 71) & (np.abs(slow + np.float32(0.3) * fast) < c.uniform(0, 0.05))] = -60
    c.hu += soft * (c.uniform(2, 10) * slow + c.uniform(1, 6) * fast)
    bone = c.hu > 250
    c.hu[bone] *= 1 + np.float32(c.uniform(0.05, 0.25)) * fast[bone]
    lung = (c.hu < -600) & (c.hu > -900)
    c.hu += lung * (c.uniform(5, 20) * fast)


def _clutter(c: Canvas) -> None:
    """Paint small structures without a name, in soft parts only: strands of fat and muscle, small vessels."""
    soft = (c.hu > -150) & (c.hu < 100)
    for _ in range(int(c.rng.integers(8, 36))):
        length = float(np.exp(c.uniform(np.log(0.015), np.log(0.12))))
        kind = c.rng.random()
        value = c.uniform(-110, -40) if kind < 0.5 else c.uniform(20, 80) if kind < 0.9 else c.uniform(100, 250)
        c.ellipse(
            c.uniform(-0.85, 0.85), c.uniform(-0.6, 0.6), length, length * c.uniform(0.1, 0.45), value,
            angle=c.uniform(0, np.pi), wobble=0.3, within=soft,
        )  # fmt: skip


_ANATOMIES = {_chest: 0.28, _abdomen: 0.34, _pelvis: 0.12, _shoulders: 0.08, _head: 0.18}


def body(size: int, rng: np.random.Generator, anatomy_share: float) -> FloatArray:
    """Paint one body (or set of ellipses) at twice the size, [2·size, 2·size]."""
    anatomy = rng.random() < anatomy_share
    close_up = rng.random() < 0.08
    zoom = float(rng.uniform(1.3, 2.2) if close_up else rng.uniform(0.92, 1.3))
    room = 0.35 if close_up else 0.08
    shift = (float(rng.normal(0, room)), float(rng.normal(0, room)))
    bend = float(rng.uniform(0.008, 0.04)) if anatomy else 0.0
    canvas = Canvas(2 * size, rng, zoom=zoom, tilt=float(rng.normal(0, 0.08)), shift=shift, bend=bend)
    if anatomy:
        paint = [*_ANATOMIES][int(rng.choice(len(_ANATOMIES), p=[*_ANATOMIES.values()]))]
        if paint in (_chest, _abdomen, _pelvis) and rng.random() < 0.25:
            _arms(canvas)
        paint(canvas)
        if paint is not _head:
            _clutter(canvas)
        if not close_up and rng.random() < 0.7:
            _table(canvas)
        _tissue(canvas)
    else:
        _ellipses(canvas)
        if rng.random() < 0.5:
            _tissue(canvas)
    return canvas.hu
