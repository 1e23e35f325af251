"""A header read the quick way says what the `gguf` package says, and a bad one says what is wrong."""

import gguf
import pytest
import tiny_models

from gpu.errors import ModelError
from gpu.gguf_file import open_gguf
from gpu.model_card import read_model_card


def test_tensors_and_metadata_agree_with_the_gguf_package(tiny):
    ours, theirs = open_gguf(tiny), gguf.GGUFReader(str(tiny))
    assert ours.metadata["general.architecture"] == "llama"
    assert ours.metadata["tokenizer.ggml.tokens"] == theirs.fields["tokenizer.ggml.tokens"].contents()
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.type, entry.start, entry.size) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert bytes(ours.raw(tensor.name)) == tensor.data.tobytes()


def test_a_card_is_read_without_an_array_library(tiny):
    import subprocess
    import sys

    code = (
        f"import sys; from gpu.model_card import read_model_card; card = read_model_card({str(tiny)!r});"
        "assert not {'numpy', 'numba', 'torch'} & set(sys.modules); print(card.context_length)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tiny_models.CONTEXT)


def test_a_card_counts_parameters_and_names_the_ends(tiny):
    card = read_model_card(tiny)
    assert card.parameters == sum(w.size for w in tiny_models.random_weights().values())
    assert card.eos_ids == (tiny_models.EOS,)
    assert card.quantization == "Q4_0"


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 5000])
def test_a_file_cut_short_is_refused_with_what_to_do(tiny, tmp_path, keep):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(ModelError):
        open_gguf(cut)


def test_a_file_that_lacks_its_last_byte_is_refused(tiny, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cut short"):
        open_gguf(cut)


def test_damaged_lengths_are_refused_not_followed(tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    data[24:32] = b"\xff" * 8
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        open_gguf(bad)


def test_a_field_of_no_known_kind_is_refused(tiny, tmp_path):
    data, key = bytearray(tiny.read_bytes()), b"llama.context_length"
    at = data.index(key) + len(key)
    data[at : at + 4] = (99).to_bytes(4, "little")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        open_gguf(bad)


def test_a_missing_file_and_a_text_file_are_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        open_gguf(tmp_path / "none.gguf")
    text = tmp_path / "text.gguf"
    text.write_text("hello, I am not a model at all")
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_gguf(text)


def test_an_unknown_tensor_type_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    path = tiny_models.write_gguf(tmp_path / "good.gguf", tiny_models.random_weights(), "F32")
    del writer
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    (tmp_path / "q5.gguf").write_bytes(data[:at] + (6).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelError, match=r"attn_q\.weight.*Q5_0"):
        read_model_card(tmp_path / "q5.gguf")
