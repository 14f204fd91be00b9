"""A model that runs at 2 bits after the first bytes have come, and gets better while the rest is on its way.

    python examples/progressive_http.py

A server on this machine offers a progressive file. The client fetches the header, then one part after the other, by
HTTP range requests, and appends each to its own copy. After the first part it loads the model and runs it; each further
part is added to the same live model by `grow`.
"""

import argparse
import http.server
import re
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import torch

from bitdial import (
    CalibrateConfig,
    QuantConfig,
    build_model,
    calibrate,
    file_parts,
    grow,
    load,
    prepare,
    save,
    set_bits,
)

CHUNK = 1 << 16


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves the files of one folder, of which a client may ask for `bytes=FIRST-LAST`."""

    def do_GET(self) -> None:
        """Answer with the range, or with an error; whole files are not served."""
        path = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d{1,18})-(\d{1,18})", self.headers.get("Range", ""))
        size = path.stat().st_size if path.is_file() else 0
        if not size:
            self.send_error(404)
        elif asked is None or not int(asked[1]) <= int(asked[2]) < size:
            self.send_error(416)
        else:
            first, left = int(asked[1]), int(asked[2]) - int(asked[1]) + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + left - 1}/{size}")
            self.send_header("Content-Length", str(left))
            self.end_headers()
            with path.open("rb") as file:
                file.seek(first)
                while left and (data := file.read(min(CHUNK, left))):
                    self.wfile.write(data)
                    left -= len(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Be silent."""


def fetch(url: str, begin: int, end: int, to: Path) -> None:
    """Append bytes `begin` to `end` of what is at `url` to the file `to`, which has those before."""
    if begin == end:
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-{end - 1}"})
    with urllib.request.urlopen(request, timeout=10) as answer, to.open("ab") as file:
        data = answer.read(end - begin + 1)
        if answer.status != 206 or len(data) != end - begin:
            raise SystemExit(f"{url}: the server does not answer range requests")
        file.write(data)


def client(url: str, path: Path, x: torch.Tensor, best: torch.Tensor) -> None:
    """Run what has come so far, part by part; `best` are the outputs at the highest width."""
    fetch(url, 0, 8, path)
    fetch(url, 8, 8 + int.from_bytes(path.read_bytes(), "little"), path)
    live = None
    for part in file_parts(path):  # the header is there, and says which bytes come next
        fetch(url, part.begin, part.end, path)
        if live is None:
            live = load(path, bit_choices=(part.bits,))
        else:
            grow(live, path)
        set_bits(live, part.bits)
        error = float((live(x) - best).abs().mean() / best.abs().mean())
        print(f"{part.end:9,} bytes: running at {part.bits} bits, {100 * error:5.1f} % from the outputs at the highest")


def main() -> None:
    """Make a model and its file, serve it, and be its client."""
    parser = argparse.ArgumentParser(description="a model that runs before all of its file has come")
    parser.add_argument("--width", type=int, default=16, help="channels of the network's first stage (default: 16)")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(64, 3, 16, 16)
    config = QuantConfig(bit_choices=(8, 6, 4, 3, 2), scheme="nested")
    model = prepare(build_model("cifar_resnet", blocks=1, width=options.width), config, x)
    calibrate(model.eval(), [x], CalibrateConfig(round_jointly=False), progress=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(model, folder / "model.safetensors", progressive=True)
        handler = lambda *arguments: Ranges(*arguments, directory=name)  # noqa: E731
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                url = f"http://127.0.0.1:{server.server_address[1]}/model.safetensors"
                with torch.no_grad():
                    client(url, folder / "fetched.safetensors", x, model(x))
            finally:
                server.shutdown()
                thread.join()


if __name__ == "__main__":
    main()
