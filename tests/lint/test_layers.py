"""The rules of check_layers.py hold in the repository, and each of them can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_layers import (
    LAYERS,
    REPOSITORY,
    SourceTree,
    check_machine_paths,
    layer_of,
    repository_files,
)


@pytest.fixture
def tree(tmp_path: Path):
    """A function that writes files, given as `{path: text}`, and returns their SourceTree."""

    def make(files: dict[str, str]) -> SourceTree:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return SourceTree(tmp_path)

    return make


def messages(findings) -> list[str]:
    return [str(finding) for finding in findings]


def test_repository_arrows_go_one_way():
    assert messages(SourceTree(REPOSITORY).check_arrows()) == []


def test_repository_keeps_torch_and_grpc_apart():
    assert messages(SourceTree(REPOSITORY).check_torch_and_grpc()) == []


def test_repository_names_no_machine_path():
    assert messages(check_machine_paths(REPOSITORY, repository_files(REPOSITORY))) == []


def test_repository_has_sources():
    assert len(SourceTree(REPOSITORY).includes) > 50


def test_every_layer_has_a_folder():
    assert [name for name in LAYERS if not (REPOSITORY / name).is_dir()] == []


def test_the_table_has_no_cycle():
    done: set[str] = {"proto"}
    remaining = dict(LAYERS)
    while remaining:
        ready = {name for name, allowed in remaining.items() if allowed <= done}
        assert ready, f"cycle among {sorted(remaining)}"
        done |= ready
        remaining = {name: allowed for name, allowed in remaining.items() if name not in ready}


def test_the_longest_folder_wins():
    assert layer_of("services/rollout/engine/engine.h") == "services/rollout/engine"
    assert layer_of("services/rollout/main.cc") == "services/rollout"
    assert layer_of("tandem/types/v1/tensor.pb.h") == "proto"
    assert layer_of("vector") is None


def test_an_arrow_upwards_is_found(tree):
    found = tree({"common/tensor/a.h": '#include "common/model/b.h"\n'}).check_arrows()
    assert messages(found) == [
        "common/tensor/a.h: common/tensor may not include common/model/b.h (common/model)"
    ]


def test_one_server_may_not_include_another(tree):
    files = {"services/trainer/service/a.cc": '#include "services/critic/engine/engine.h"\n'}
    assert len(tree(files).check_arrows()) == 1


@pytest.mark.parametrize("file", ["a_test.cc", "testing/a.h"])
def test_a_test_of_a_server_may_talk_to_another(tree, file):
    own, others = f"services/trainer/service/{file}", "services/critic/engine/engine.h"
    assert tree({own: f'#include "{others}"\n', others: ""}).check_arrows() == []


def test_a_message_in_a_tensor_layer_is_found(tree):
    files = {"common/loss/a.cc": '#include "tandem/types/v1/tensor.pb.h"\n'}
    assert len(tree(files).check_arrows()) == 1


def test_an_unknown_folder_is_found(tree):
    assert len(tree({"common/misc/a.h": ""}).check_arrows()) == 1


@pytest.mark.parametrize("torch", ["<ATen/ATen.h>", '"torch/torch.h"', "<c10/util/Half.h>"])
@pytest.mark.parametrize("grpc", ["<grpcpp/grpcpp.h>", '"tandem/weights/v1/weights.grpc.pb.h"'])
def test_torch_beside_grpc_is_found(tree, torch, grpc):
    files = {"common/rpc/a.cc": f"#include {torch}\n#include {grpc}\n"}
    assert len(tree(files).check_torch_and_grpc()) == 1


def test_torch_and_grpc_through_our_own_headers_are_found(tree):
    found = tree(
        {
            "common/rpc/a.cc": '#include "common/rpc/b.h"\n#include "common/tensor/c.h"\n',
            "common/rpc/b.h": "#include <grpcpp/grpcpp.h>\n",
            "common/tensor/c.h": '#include "common/tensor/d.h"\n',
            "common/tensor/d.h": "# include <ATen/core/Tensor.h>\n",
        }
    ).check_torch_and_grpc()
    assert messages(found) == [
        "common/rpc/a.cc: mixes torch and gRPC: ATen/core/Tensor.h (by common/tensor/d.h), "
        "grpcpp/grpcpp.h (by common/rpc/b.h)"
    ]


def test_grpc_in_an_engine_is_found(tree):
    files = {"services/rollout/engine/a.cc": "#include <grpcpp/channel.h>\n"}
    assert "an engine knows no gRPC" in messages(tree(files).check_torch_and_grpc())[0]


def test_torch_in_a_service_is_found(tree):
    files = {"services/rollout/service/a.cc": "#include <ATen/ATen.h>\n"}
    assert "a service knows no torch" in messages(tree(files).check_torch_and_grpc())[0]


def test_a_machine_path_is_found(tmp_path: Path):
    text = "ok: ./work/x and https://a.b/home/y\nbad: /" + "home/somebody/model\n"
    (tmp_path / "a.md").write_text(text)
    found = messages(check_machine_paths(tmp_path, ["a.md"]))
    assert found == ["a.md:2: machine path /" + "home/somebody"]
