"""How Ullage speaks gRPC: servers, channels, errors and waiting, the same in every service.

The channel options here are those that were seen to work; gRPC never reports one it does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_status import rpc_status

M = TypeVar("M", bound=Message)
T = TypeVar("T")

ERROR_DOMAIN: Final = "ullage"
MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest message taken: an activation of some thousand tokens; gRPC's own 4 MiB is too small for it."""

_SHARED_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Otherwise 4 MiB a stream pile up before a slow reader is noticed.
    ("grpc.http2.lookahead_bytes", 65536),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    # On by default, a second server would bind the same port without a word and get half the calls.
    ("grpc.so_reuseport", 0),
    # Not min_recv_ping_interval_without_data_ms, the macro's name, which nothing reads.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
CHANNEL_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    # A peer that comes back is dialled within this, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

PORT_MAX: Final = 65535
STATUS_SECONDS: Final = 5.0
"""For the status of a call that has failed."""

log = structlog.get_logger()


class RpcError(Exception):
    """An error a caller is meant to see: it becomes the status of the call, with ErrorInfo and typed details."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        details: Sequence[Message] = (),
    ) -> None:
        """`reason` is UPPER_SNAKE and stable, for programs; `message` says what to do, for people."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.details = tuple(details)

    def to_status(self) -> status_pb2.Status:
        """The google.rpc.Status that carries this error."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata)
        status = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=self.message)
        for detail in (info, *self.details):
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status


class AddressError(Exception):
    """An address cannot be listened on; the message says why and what to do."""


def error_detail(error: grpc.RpcError, kind: type[M]) -> M | None:
    """The first detail of `kind` that a failed call carries, or None."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an aio error is no Call, but has what is read
    for packed in status.details if status is not None else ():
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None


def error_reason(error: grpc.RpcError) -> str | None:
    """The stable reason a service gave for a failed call, or None for an error of gRPC's own."""
    info = error_detail(error, error_details_pb2.ErrorInfo)
    return None if info is None else info.reason


def listen_address(address: str, *, insecure: bool) -> str:
    """`address` itself where it may be listened on: loopback, a unix socket, or any with `insecure`.

    Raises AddressError for another, since there is no TLS yet: whoever reaches the port may do anything.
    """
    if address.startswith("unix:"):
        return address
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal():
        raise AddressError(f"{address!r} is no address: write HOST:PORT, e.g. 127.0.0.1:50500")
    if int(port) > PORT_MAX:
        # gRPC would listen on what is left of it in 16 bits.
        raise AddressError(f"{address!r} is no address: a port is at most {PORT_MAX}, e.g. 127.0.0.1:50500")
    if insecure or _is_loopback(host.strip("[]")):
        return address
    raise AddressError(
        f"{address} can be reached from other machines and there is no TLS yet: "
        "listen on 127.0.0.1, or say --insecure if the network is yours"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def channel(address: str) -> grpc.aio.Channel:
    """A channel to `address`. One for each peer: channels are dear, calls are cheap."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def keep_status(call: T) -> T:
    """`call`, a streaming one of grpc.aio's, which from now on ends as its server said.

    Where a write fails because the call has ended, gRPC 1.85 puts INTERNAL "Internal error from Core" in the place of
    the server's status (grpc/grpc issue 36066): nine times in ten where it refuses a client that goes on writing.
    """
    inside: Any = call
    inside._cython_call = _KeptStatus(inside._cython_call)
    return call


class _KeptStatus:
    """gRPC's own call, but for what a failed write does to its status."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def send_serialized_message(self, message: bytes) -> None:
        try:
            await self._call.send_serialized_message(message)
        except grpc.aio.InternalError:
            # The call is over, and why is on its way, if it was not here first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_SECONDS):
                    await self._call.status()
            if not self._call.done():
                raise

    def set_internal_error(self, error: str) -> None:
        """Only where there is no better word."""
        if not self._call.done():
            self._call.set_internal_error(error)


def backoff_seconds(first: float = 0.2, last: float = 5.0) -> Iterator[float]:
    """Waits between attempts, doubling from `first` to `last` and staying there."""
    wait = first
    while True:
        yield wait
        wait = min(wait * 2, last)


class Server:
    """A gRPC server with what every server of Ullage has: health, reflection (v1alpha and v1), channelz, errors.

    Health is NOT_SERVING, for the whole server and for each service, until `set_serving`.
    """

    def __init__(self, *interceptors: grpc.aio.ServerInterceptor) -> None:
        """`interceptors` see each call before its service does; what they raise is translated like a service's."""
        self._server = grpc.aio.server(interceptors=[_ErrorInterceptor(), *interceptors], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []

    def add(self, name: str, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Serve `servicer` as the service of full `name`; `register` is the generated add_..._to_server."""
        register(servicer, self._server)
        self._names.append(name)

    async def start(self, address: str) -> int:
        """Listen, and return the port (0 for a unix socket). Raises AddressError when the address is taken."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        channelz.add_channelz_servicer(self._server)
        self._add_reflection()
        await self.set_serving(serving=False)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise AddressError(
                f"cannot listen on {address}: it is in use or not this machine's; "
                "stop what listens there, or choose another with --listen"
            ) from error
        await self._server.start()
        return port

    def _add_reflection(self) -> None:
        names = (*self._names, health.SERVICE_NAME, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        # v1 is the same protocol under another name; grpcio has the older one only.
        servicer = reflection.aio.ReflectionServicer(names)
        method = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": method}
                ),
            )
        )

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checks whether calls will be answered."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Refuse new calls, let running ones end within `grace_seconds`, then cut them off."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._server.wait_for_termination()


_Behaviour = Callable[[Any, Any], Any]


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Makes RpcError a status, and keeps the text of any other exception from the caller."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        make: Any
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                make, wrapped = grpc.unary_unary_rpc_method_handler, _unary(method, handler.unary_unary)
            case True, False:
                make, wrapped = grpc.stream_unary_rpc_method_handler, _unary(method, handler.stream_unary)
            case False, True:
                make, wrapped = grpc.unary_stream_rpc_method_handler, _stream(method, handler.unary_stream)
            case _:
                make, wrapped = grpc.stream_stream_rpc_method_handler, _stream(method, handler.stream_stream)
        return make(
            wrapped, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


def _unary(method: str, behaviour: _Behaviour) -> _Behaviour:
    async def translated(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(context, method, error)

    return translated


def _stream(method: str, behaviour: _Behaviour) -> _Behaviour:
    if not inspect.isasyncgenfunction(behaviour):
        # It writes by itself (health's Watch does), so there is nothing to pass on.
        return behaviour

    async def translated(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except Exception as error:
            await _abort(context, method, error)

    return translated


async def _abort(context: Any, method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, RpcError):
        log.error("call failed", method=method, exc_info=error)
        error = RpcError(
            grpc.StatusCode.INTERNAL, "internal error; the service's log has it in full", reason="INTERNAL"
        )
    await context.abort_with_status(rpc_status.to_status(error.to_status()))
    raise AssertionError("abort_with_status returned")
