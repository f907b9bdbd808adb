"""The model.py of the page that takes the place of a DALI pipeline."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gateway.errors import InferenceError
from gateway.in_process.server import Server
from tests.builders import add_model
from tests.serving import ROOT


def picture(color: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, "PNG")
    return file.getvalue()


def test_pictures_become_pixels(tmp_path: Path) -> None:
    page = (ROOT / "backends/python/README.md").read_text()
    program, config = re.findall(r"```(?:python)?\n([^`]*PIXELS[^`]*)```", page)
    (add_model(tmp_path, "pictures", config) / "1/model.py").write_text(program)
    with Server(model_repository=tmp_path) as server:
        model = server.model("pictures")
        files = np.array([[picture((255, 0, 0))], [picture((0, 0, 255))]], object)
        pixels = model.infer(inputs={"PICTURE": files}).only().outputs["PIXELS"]
        assert pixels.shape == (2, 3, 224, 224)
        assert pixels[0, :, 5, 5] == pytest.approx([2.2489, -2.0357, -1.8044], abs=1e-3)
        assert pixels[1, :, 5, 5] == pytest.approx([-2.1179, -2.0357, 2.64], abs=1e-3)
        with pytest.raises(InferenceError, match="PICTURE is no picture"):
            model.infer(inputs={"PICTURE": [[b"no picture"]]}).only()
