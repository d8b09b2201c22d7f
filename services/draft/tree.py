"""The speculation tree of one session: everything the draft foresaw about what follows the committed tokens.

The root is the last committed token. A node is *fed* once the engine's cache holds it, and *open* until it
has a prediction: what the draft model says may follow it. A prediction is a pure function of the path, so the
tree may be grown at any time and in any order, and the next context re-roots it at the node where its path
ends: everything below stays, everything beside goes.

`services.draft.proposals` reads proposals off the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.draft.predictions import Prediction

__all__ = ["IN_CHAIN", "Node", "SpeculationTree"]

IN_CHAIN = -1
"""Place of a node in the engine's chain, where its position is its slot."""


class Node:
    """One token that may come.

    Attributes:
        token_id: The token.
        position: Its absolute position.
        parent: The node before it; None for the root.
        prediction: What may follow; None while the node is open.
        place: Where the engine's cache holds it: IN_CHAIN, or the index among its tree's nodes; None: unfed.
        is_ahead: Fed before it was asked for, and not of use so far.
    """

    __slots__ = ("_children", "is_ahead", "parent", "place", "position", "prediction", "token_id")

    def __init__(self, token_id: int, position: int, parent: Node | None) -> None:
        self.token_id, self.position, self.parent = token_id, position, parent
        self.prediction: Prediction | None = None
        self.place: int | None = None
        self.is_ahead = False
        self._children: dict[int, Node] = {}

    def child(self, token_id: int) -> Node:
        """Return the child with a token, a new one where there is none."""
        node = self._children.get(token_id)
        if node is None:
            node = self._children[token_id] = Node(token_id, self.position + 1, self)
        return node

    def find(self, token_id: int) -> Node | None:
        """Return the child with a token, if there is one."""
        return self._children.get(token_id)

    def path(self) -> list[Node]:
        """Return the nodes from behind the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def clear(self) -> list[Node]:
        """Forget what follows and return the children."""
        children = list(self._children.values())
        self.prediction, self.parent, self._children = None, None, {}
        return children

    def below(self) -> Iterator[Node]:
        """Yield all nodes below, each after its parent."""
        waiting = list(self._children.values())
        for node in waiting:
            yield node
            waiting.extend(node._children.values())


class SpeculationTree:
    """The tree below one session's committed tokens, and where the engine's cache holds its nodes.

    The engine holds a chain (the committed tokens, then the line that was drafted token by token) and beside
    it nodes in the order in which they were fed.

    Args:
        root: The last committed token.
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        self.chain_length = 0
        self.beside: list[Node] = []

    @property
    def base(self) -> int:
        """Number of committed tokens."""
        return self.root.position + 1

    def find(self, token_ids: Sequence[int]) -> Node:
        """Return the deepest node on the path of `token_ids` below the root."""
        node = self.root
        for token_id in token_ids:
            following = node.find(token_id)
            if following is None:
                break
            node = following
        return node

    def root_fed(self) -> None:
        """Note that the committed tokens were fed, and nothing behind them."""
        self.root.place, self.chain_length, self.beside = IN_CHAIN, self.base, []

    def feeds_chain(self, nodes: Sequence[Node]) -> bool:
        """Whether feeding these nodes makes the engine's chain longer: the cheapest way."""
        parent = nodes[0].parent
        assert parent is not None
        is_tip = parent.place == IN_CHAIN and parent.position == self.chain_length - 1
        return len(nodes) == 1 and not self.beside and is_tip

    def parents_of(self, nodes: Sequence[Node]) -> list[int]:
        """Return the engine's index of each node's parent: among its nodes, or from the chain's end back."""
        parents = []
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert parent.place is not None
            in_chain = parent.place == IN_CHAIN
            parents.append(parent.position - self.chain_length if in_chain else parent.place)
        return parents

    def fed(self, nodes: Sequence[Node]) -> None:
        """Note that these nodes were fed."""
        if self.feeds_chain(nodes):
            nodes[0].place = IN_CHAIN
            self.chain_length += 1
            return
        for node in nodes:
            node.place = len(self.beside)
            self.beside.append(node)

    def move_root(self, root: Node) -> tuple[int, list[int], list[int]] | None:
        """Make a fed node the root; what is not below it is forgotten.

        Returns:
            How the engine's nodes must move: the base and path that become chain, and the nodes that stay
            beside it; None when they stay where they are.
        """
        dropped, line = self.root, root.path()
        is_in_chain = root.place == IN_CHAIN
        root.parent, self.root = None, root
        _forget(dropped, root)
        if not self.beside:
            return None
        line += _main_line(root)
        moving = [node for node in line if node.place != IN_CHAIN]
        base = self.chain_length
        if moving and not is_in_chain:
            base = moving[0].position  # the chain goes on differently from here
        elif moving and moving[0].position < base:
            moving = []  # the chain goes on behind the line: both stay
        path = _places(moving)
        kept = sorted(set(_places(root.below())) - set(path))
        self.beside = [self.beside[place] for place in kept]
        for node in moving:
            node.place = IN_CHAIN
        for place, node in enumerate(self.beside):
            node.place = place
        self.chain_length = base + len(path)
        return base, path, kept


def _forget(old_root: Node, root: Node) -> None:
    """Break the cycles of what is not below the new root, so that its memory is free at once."""
    waiting = [old_root]
    for node in waiting:
        if node is not root:
            waiting += node.clear()


def _main_line(root: Node) -> list[Node]:
    """The fed nodes that the draft itself would go on with below a node."""
    line, node, base = [], root, root.position + 1
    while node.prediction is not None:
        following = node.find(node.prediction.choose(base))
        if following is None or following.place is None:
            break
        line.append(following)
        node = following
    return line


def _places(nodes: Iterable[Node]) -> list[int]:
    """The places beside the chain that these nodes take."""
    return [node.place for node in nodes if node.place is not None and node.place != IN_CHAIN]
