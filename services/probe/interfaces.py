"""The node's network interfaces: each address that is up, with what carries it."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Final

import psutil

from ullage.v1 import node_pb2

_PREFIXES: Final[tuple[tuple[str, node_pb2.InterfaceKind.ValueType], ...]] = (
    ("local area", node_pb2.INTERFACE_KIND_OTHER),  # Windows calls anything so, and its loopback by another name.
    ("lo", node_pb2.INTERFACE_KIND_LOOPBACK),
    ("wl", node_pb2.INTERFACE_KIND_WIFI),
    ("wi-fi", node_pb2.INTERFACE_KIND_WIFI),
    ("thunderbolt", node_pb2.INTERFACE_KIND_THUNDERBOLT),
    ("tun", node_pb2.INTERFACE_KIND_TUNNEL),
    ("tap", node_pb2.INTERFACE_KIND_TUNNEL),
    ("utun", node_pb2.INTERFACE_KIND_TUNNEL),
    ("wg", node_pb2.INTERFACE_KIND_TUNNEL),
    ("tailscale", node_pb2.INTERFACE_KIND_TUNNEL),
    ("ppp", node_pb2.INTERFACE_KIND_TUNNEL),
    ("eth", node_pb2.INTERFACE_KIND_ETHERNET),
    ("en", node_pb2.INTERFACE_KIND_ETHERNET),
)
"""By the names that kernels and system managers give, in small letters; another name is OTHER."""

_TUNNEL_TYPES: Final = frozenset({"512", "768", "769", "776", "778", "823", "65534"})
"""Linux's ARPHRD numbers of PPP, IP in IP, IPv6 in IPv6, SIT, GRE, GRE over IPv6, and no link layer at all."""

INTERFACES_MAX: Final = 256
"""A host of many containers has thousands, whose ends have link-local addresses: no master takes so large a message."""

_MEGABITS_UNKNOWN: Final = frozenset({0, 65535, 4294967295})
"""What drivers say when they do not know: 0, or -1 read as unsigned."""


def interfaces(root: Path) -> list[node_pb2.NetworkInterface]:
    """One entry for each IP address of an interface that is up, by name; of too many, those that others can reach.

    May raise whatever psutil does.
    """
    stats = psutil.net_if_stats()
    found: list[node_pb2.NetworkInterface] = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name not in stats or not stats[name].isup:
            continue
        found.extend(
            _interface(name, address.address, stats[name].speed, root)
            for address in addresses
            if address.family in {socket.AF_INET, socket.AF_INET6}
        )
    if len(found) > INTERFACES_MAX:
        found.sort(key=lambda each: each.link_local)
    return found[:INTERFACES_MAX]


def _interface(name: str, scoped: str, megabits: int, root: Path) -> node_pb2.NetworkInterface:
    address = scoped.partition("%")[0]
    return node_pb2.NetworkInterface(
        name=name,
        address=address,
        kind=kind(name, root),
        speed_bits_per_second=None if megabits in _MEGABITS_UNKNOWN else megabits * 1_000_000,
        link_local=ipaddress.ip_address(address).is_link_local,
    )


def kind(name: str, root: Path) -> node_pb2.InterfaceKind.ValueType:
    """What carries the interface: Linux says which are wireless, and which are tunnels; the rest goes by its name."""
    folder = root / "sys/class/net" / name
    if (folder / "wireless").exists():
        return node_pb2.INTERFACE_KIND_WIFI
    if (folder / "tun_flags").exists():  # Those of a program's that carry whole Ethernet frames have its type.
        return node_pb2.INTERFACE_KIND_TUNNEL
    try:
        if (folder / "type").read_text(encoding="ascii", errors="replace").strip() in _TUNNEL_TYPES:
            return node_pb2.INTERFACE_KIND_TUNNEL
    except OSError:
        pass
    small = name.lower()
    return next((kind for prefix, kind in _PREFIXES if small.startswith(prefix)), node_pb2.INTERFACE_KIND_OTHER)
