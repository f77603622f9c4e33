"""Tests that the private parts of Flower that `flower.py` uses exist as in its version, one by one."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import flwr.app
from flwr.app.message import make_message

import device_runner
from device_runner.android.packages import FLEET_WHEELS
from device_runner.fleet.network import flower

# Parameters in order, "=" after those with a default.
FUNCTIONS = """
flwr.app.message.remove_content_from_message(message)
flwr.common.serde.message_to_proto(message)
flwr.supercore.error.FlowerError(code, message, public_details=)
flwr.supercore.error.FlowerError.to_json(self, public_message)
flwr.supercore.error.http_error_translator(request, call_next)
flwr.supercore.inflatable.inflatable_object.get_all_nested_objects(obj)
flwr.supercore.inflatable.inflatable_object.get_object_tree(obj)
flwr.supercore.inflatable.inflatable_object.iterate_object_tree(tree)
flwr.supercore.inflatable.inflatable_object.no_object_id_recompute()
flwr.supercore.inflatable.inflatable_protobuf_utils.make_confirm_message_received_fn_protobuf(\
confirm_message_received_protobuf, node, run_id)
flwr.supercore.inflatable.inflatable_protobuf_utils.make_pull_object_fn_protobuf(\
pull_object_protobuf, node, run_id)
flwr.supercore.inflatable.inflatable_protobuf_utils.make_push_object_fn_protobuf(\
push_object_protobuf, node, run_id, session_id)
flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents(\
object_id, object_contents, keep_object_contents=, objects=)
flwr.supercore.inflatable.inflatable_utils.pull_and_inflate_object_from_tree(\
object_tree, pull_object_fn, confirm_object_received_fn, return_type=, max_concurrent_pulls=, max_time=, \
max_tries_per_object=, initial_backoff=, backoff_cap=)
flwr.supercore.inflatable.inflatable_utils.push_objects(\
objects, push_object_fn, object_ids_to_push=, keep_objects=, max_concurrent_pushes=)
flwr.supercore.interceptors.RuntimeVersionHttpInterceptor(component_name)
flwr.supercore.object_store.NoObjectInStoreError(message)
flwr.supercore.object_store.ObjectStore.delete(self, object_id)
flwr.supercore.object_store.ObjectStore.get(self, object_id)
flwr.supercore.object_store.ObjectStore.get_object_tree(self, object_id)
flwr.supercore.primitives.asymmetric.bytes_to_public_key(public_key_bytes)
flwr.supercore.primitives.asymmetric.public_key_to_bytes(public_key)
flwr.supercore.primitives.asymmetric.verify_signature(public_key, message, signature)
flwr.supercore.protobuf.translation.ProtobufTranslationMiddleware(app, dispatch=)
flwr.supernode.fleet_http_client.FleetHttpClient.from_server_address(\
server_address, insecure, root_certificates, interceptors, retry_invoker=)
flwr.supernode.fleet_http_client.FleetHttpClient.ActivateNode(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.ConfirmMessageReceived(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.DeactivateNode(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.PullMessages(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.PullObject(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.PushMessages(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.PushObject(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.RegisterNode(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.SendNodeHeartbeat(self, request)
flwr.supernode.fleet_http_client.FleetHttpClient.close(self)
flwr.supernode.node_auth_http_interceptor.NodeAuthHttpInterceptor(private_key, public_key)
flwr.superlink.config_loader.get_federation_manager(is_simulation=)
flwr.superlink.config_loader.get_objectstore_linkstate_factories(database, federation_manager)
flwr.superlink.federation.FederationManager.ensure_default_federations_exist(self, flwr_aid)
flwr.superlink.routers.fleet.node_auth.NodeAuthMiddleware(app, dispatch=)
flwr.server.superlink.linkstate.LinkState.acknowledge_task_heartbeat(self, task_id)
flwr.server.superlink.linkstate.LinkState.activate_task(self, task_id)
flwr.server.superlink.linkstate.LinkState.claim_task(self, task_id)
flwr.server.superlink.linkstate.LinkState.cleanup_run(self, run_id)
flwr.server.superlink.linkstate.LinkState.create_node(\
self, owner_aid, owner_name, public_key, heartbeat_interval, location=, name=)
flwr.server.superlink.linkstate.LinkState.create_run(\
self, fab_id, fab_version, fab_hash, override_config, federation_id, federation_config, flwr_aid, \
primary_task_type, series_id=, series_description=, connector_ids=, initial_task_event=, user_prompt=)
flwr.server.superlink.linkstate.LinkState.delete_messages(self, message_ins_ids)
flwr.server.superlink.linkstate.LinkState.delete_node(self, owner_aid, node_id)
flwr.server.superlink.linkstate.LinkState.finish_task(self, task_id, sub_status, details)
flwr.server.superlink.linkstate.LinkState.get_message_res(self, message_ids, run_id)
flwr.server.superlink.linkstate.LinkState.get_node_id(self)
flwr.server.superlink.linkstate.LinkState.get_node_info(self, node_ids=, owner_aids=, statuses=)
flwr.server.superlink.linkstate.LinkState.get_nodes(self, run_id)
flwr.server.superlink.linkstate.LinkState.get_run_info(\
self, run_ids=, statuses=, flwr_aids=, federation_ids=, order_by=, ascending=, limit=, skip=)
flwr.server.superlink.linkstate.LinkState.get_tasks(\
self, task_ids=, run_ids=, statuses=, order_by=, ascending=, limit=)
flwr.server.superlink.linkstate.LinkState.start_session(self, run_id)
flwr.server.superlink.linkstate.LinkState.stop_run(self, run_id)
flwr.server.superlink.linkstate.LinkState.store_message_and_object_tree(\
self, message, object_tree, session_id)
flwr.server.superlink.linkstate.LinkState.store_object(self, run_id, session_id, object_id, object_content)
""".strip().splitlines()
PROPERTIES = """
flwr.server.superlink.linkstate.LinkState.federation_manager
flwr.server.superlink.linkstate.LinkState.object_store
""".split()
VALUES: dict[str, object] = {
    "flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION": 2,
    "flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL": 30,
    "flwr.common.constant.NOOP_ACCOUNT_NAME": "none",
    "flwr.common.constant.NOOP_FLWR_AID": "<id:none>",
    "flwr.common.constant.Status.FINISHED": "finished",
    "flwr.common.constant.Status.RUNNING": "running",
    "flwr.common.constant.SubStatus.COMPLETED": "completed",
    "flwr.common.constant.SYSTEM_TIME_TOLERANCE": 5,
    "flwr.common.constant.TIMESTAMP_HEADER": "flwr-timestamp",
    "flwr.common.constant.TIMESTAMP_TOLERANCE": 300,
    "flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER": "flwr-public-key",
    "flwr.supercore.constant.FLEET_HTTP_SIGNATURE_HEADER": "flwr-signature",
    "flwr.supercore.constant.NOOP_FEDERATION_ID": "@none/default",
    "flwr.supercore.constant.TaskType.SERVER_APP": "flwr-serverapp",
    "flwr.supercore.logger.FLOWER_LOGGER.name": "flwr",
    "flwr.superlink.routers.fleet.router.router.prefix": "/v1/fleet",
}
FIELDS = {
    "flwr.proto.fleet_pb2.ActivateNodeRequest": "public_key heartbeat_interval",
    "flwr.proto.fleet_pb2.ActivateNodeResponse": "node_id",
    "flwr.proto.fleet_pb2.DeactivateNodeRequest": "node_id",
    "flwr.proto.fleet_pb2.PullMessagesRequest": "node",
    "flwr.proto.fleet_pb2.PullMessagesResponse": "messages_list message_object_trees",
    "flwr.proto.fleet_pb2.PushMessagesRequest": (
        "node messages_list message_object_trees clientapp_runtime_list"
    ),
    "flwr.proto.fleet_pb2.PushMessagesResponse": "objects_to_push session_id",
    "flwr.proto.fleet_pb2.RegisterNodeFleetRequest": "public_key",
    "flwr.proto.heartbeat_pb2.SendNodeHeartbeatRequest": "node heartbeat_interval",
    "flwr.proto.message_pb2.ConfirmMessageReceivedRequest": "node message_object_id",
    "flwr.proto.message_pb2.Message": "metadata content",
    "flwr.proto.message_pb2.Metadata": "run_id message_id src_node_id reply_to_message_id created_at ttl",
    "flwr.proto.message_pb2.ObjectTree": "object_id children",
    "flwr.proto.node_pb2.Node": "node_id",
}
# Elsewhere the table has what they hold.
HOLDERS = """
flwr.common.constant.ErrorCode flwr.common.constant.Status flwr.common.constant.SubStatus
flwr.server.superlink.linkstate.LinkState flwr.supercore.constant.TaskType
flwr.supercore.error.ApiErrorCode flwr.supercore.error.catalog.API_ERROR_MAP
flwr.supercore.logger.FLOWER_LOGGER flwr.supercore.protobuf.translation.PROTOBUF_REQUEST_TYPES
flwr.supercore.task_identity.TaskIdentity flwr.supernode.fleet_http_client.FleetHttpClient
flwr.superlink.routers.fleet.router.router
""".split()
SOURCE = ast.parse(inspect.getsource(flower))


def resolve(name: str) -> Any:
    """Resolve a dotted name of a module and its attributes."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
            return attrgetter(".".join(parts[length:]))(module)
        except ModuleNotFoundError:
            continue
    raise AttributeError(f"Flower has no {name}")


def private_imports() -> set[str]:
    """Return the names that `flower.py` imports from Flower and that `flwr.app` does not export."""
    return {
        f"{node.module}.{each.name}"
        for node in ast.walk(SOURCE)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "flwr"
        for each in node.names
        if node.module != "flwr.app" or each.name not in flwr.app.__all__
    }


def test_flower_has_the_version_that_flower_py_was_written_for() -> None:
    assert importlib.metadata.version("flwr") == flower.VERSION
    assert f"written for Flower {flower.VERSION};" in (flower.__doc__ or "")
    assert f"flwr=={flower.VERSION}" in FLEET_WHEELS
    pinned = Path(__file__).parents[4] / "pyproject.toml"
    assert f'"flwr=={flower.VERSION}; ' in pinned.read_text()


@pytest.mark.parametrize("line", FUNCTIONS)
def test_a_function_has_its_parameters(line: str) -> None:
    name, _, expected = line.removesuffix(")").partition("(")
    parameters = inspect.signature(resolve(name)).parameters.values()
    assert expected == ", ".join(
        each.name + ("=" if each.default is not each.empty else "") for each in parameters
    )


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_exists(name: str) -> None:
    assert isinstance(resolve(name), property)


@pytest.mark.parametrize("name", VALUES)
def test_a_constant_has_its_value(name: str) -> None:
    assert resolve(name) == VALUES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_a_message_has_its_fields(name: str) -> None:
    assert {*FIELDS[name].split()} <= {field.name for field in resolve(name).DESCRIPTOR.fields}


def test_the_fleet_api_has_its_paths() -> None:
    """The admission control passes all of them."""
    assert {path.removeprefix("/v1/fleet/") for path in flower.FLEET_PATHS} == {
        "register-node",
        "activate-node",
        "deactivate-node",
        "unregister-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    }


def test_a_device_without_a_key_is_refused_as_flower_does() -> None:
    assert flower.refusal("/v1/fleet/activate-node").status_code == 412
    assert flower.refusal("/v1/fleet/pull-messages").status_code == 401


def test_attributes_without_signature_exist() -> None:
    """A message's id is an attribute of its metadata, and middleware finds its state by attributes."""
    metadata = flwr.app.Metadata(1, "", 2, 3, "", "", 0.0, 1.0, "train")
    message = make_message(metadata=metadata, content=flwr.app.RecordDict())
    reply = flower.FlowerTask(b"", "1", message).failure("Killed")
    assert reply.metadata.message_id == reply.object_id
    identity = resolve("flwr.supercore.task_identity.TaskIdentity")
    assert {"task_id", "run_id", "node_id"} <= vars(type(identity)).keys()
    for module, used in (
        ("flwr.supercore.protobuf.translation", "request.state.protobuf_request"),
        ("flwr.superlink.dependencies.linkstate", "linkstate_factory"),
        ("flwr.superlink.routers.fleet.router", "request.app.state.enable_supernode_auth"),
    ):
        assert used in inspect.getsource(importlib.import_module(module)), module


def test_the_table_has_what_is_imported_and_nothing_else() -> None:
    named = {line.partition("(")[0] for line in FUNCTIONS} | {*PROPERTIES, *VALUES, *FIELDS}
    assert {name for name in private_imports() if name not in named} == {*HOLDERS}
    calls = {node.attr for node in ast.walk(SOURCE) if isinstance(node, ast.Attribute)}
    methods = [name for name in named if name.rpartition(".")[0].rpartition(".")[2][:1].isupper()]
    assert [name for name in methods if name.rpartition(".")[2] not in calls] == []
    for owner in ("LinkState", "FleetHttpClient"):
        prefix = next(name for name in HOLDERS if name.endswith(f".{owner}"))
        held = {name.removeprefix(f"{prefix}.") for name in named if name.startswith(f"{prefix}.")}
        objects = {"LinkState": ("self._state", "state"), "FleetHttpClient": ("self._client",)}[owner]
        assert held | {"factory"} >= {
            node.attr
            for node in ast.walk(SOURCE)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in objects
        }


def test_no_other_file_imports_flower() -> None:
    root = Path(device_runner.__file__).parent
    importing = [
        path.relative_to(root)
        for path in root.rglob("*.py")
        if any(
            isinstance(node, (ast.Import, ast.ImportFrom))
            and "flwr" in {name.partition(".")[0] for name in _modules(node)}
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert importing == [Path("fleet/network/flower.py")]


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
