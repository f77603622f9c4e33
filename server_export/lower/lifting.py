"""A graph with its constants as an exported program, without tracing it once more.

torch.export would give the same program; it takes half of an export's tracing to find out what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_structure

from server_export.graph.modules import attribute
from server_export.graph.shapes import Shapes, without_memory


def exported_program(
    graph_module: GraphModule,
    inputs: Sequence[torch.Tensor],
    finish: Callable[[Graph], None] | None = None,
) -> ExportedProgram:
    """The program of a graph whose constants are get_attr nodes; these become its buffers.

    Args:
        graph_module: of functional operators, with any number of outputs. Not changed.
        inputs: tensors of the shapes and types that its placeholders stand for.
        finish: rewrites the program's graph, in which every node has a value, but for inputs and outputs.

    Returns:
        A program that returns a tuple; its nodes carry nothing but `meta["val"]`.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    graph, copies, constants = Graph(), dict[Node, Node](), dict[str, torch.Tensor]()
    mode = FakeTensorMode()
    shapes, values = Shapes(), dict[Node, Any]()

    def fake(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(fake, value))
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(mode, empty, torch.device("cpu"))

    def know(node: Node, value: Any) -> None:
        values[node] = value
        copies[node].meta = {"val": fake(value)}

    lifted: dict[str, Node] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            if name not in lifted:
                constants[name] = attribute(graph_module, name).detach()
                lifted[name] = _placeholder(graph, f"b_{name.replace('.', '_')}")
            copies[node] = lifted[name]
            know(node, without_memory(constants[name]))
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(placeholders, inputs, strict=True):
        copies[node] = _placeholder(graph, str(node.target))
        know(node, without_memory(tensor))
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            know(node, shapes.of(node.target, arguments, named))
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    answers = tuple(copies[node] for node in output.args[0])
    graph.output(answers)
    if finish is not None:
        finish(graph)
    return ExportedProgram(
        root=torch.nn.Module(),
        graph=graph,
        graph_signature=ExportGraphSignature(
            [
                *(
                    InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=True)
                    for name, node in lifted.items()
                ),
                *(
                    InputSpec(InputKind.USER_INPUT, TensorArgument(copies[node].name), None)
                    for node in placeholders
                ),
            ],
            [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in answers],
        ),
        state_dict=constants,
        range_constraints={},
        module_call_graph=[
            ModuleCallEntry(
                "",
                ModuleCallSignature(
                    inputs=[],
                    outputs=[],
                    in_spec=tree_structure((tuple(inputs), {})),
                    out_spec=tree_structure(answers),
                ),
            )
        ],
        example_inputs=(tuple(inputs), {}),
        constants={},
    )


def interpret(program: ExportedProgram, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a program of `exported_program` answers, node by node.

    As a module it would be Python code first, and compiling that takes longer than one call.
    """
    constants = [
        program.state_dict[str(spec.target)]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.BUFFER
    ]
    found: tuple[torch.Tensor, ...] = torch.fx.Interpreter(program.graph_module).run(*constants, *inputs)
    return found


def _placeholder(graph: Graph, name: str) -> Node:
    node = graph.placeholder(name)
    # Signatures know it by its name, which the graph may have changed, the engine's emitter by its target.
    node.target = node.name
    return node
