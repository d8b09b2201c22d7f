"""The speculation tree of one session: the draft's predictions of what follows the committed tokens.

The root is the last committed token. A node is *fed* once the engine's cache holds it, and *open* until it
has a prediction of the next token. A prediction is a pure function of the path, so the tree may be grown at
any time and in any order. The next context moves the root to the node where its path ends: the nodes below it
are kept, all others are dropped.

`services.speculation.proposals` reads proposals off the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.speculation.predictions import Prediction

IN_CHAIN = -1
"""Place of a node in the engine's chain, where its position is its slot."""


class Node:
    """One token that may follow.

    Attributes:
        position: Its absolute position.
        parent: The node before it; None for the root.
        prediction: Prediction of the next token; None while the node is open.
        place: Where the engine's cache holds it: IN_CHAIN, or the index among its tree's nodes; None: unfed.
        block: Of a parallel draft model: predictions of the tokens after the next one, whatever these are;
            see `services.speculation.proposals`.
    """

    __slots__ = ("_children", "block", "parent", "place", "position", "prediction", "token_id")

    def __init__(self, token_id: int, position: int, parent: Node | None) -> None:
        self.token_id, self.position, self.parent = token_id, position, parent
        self.prediction: Prediction | None = None
        self.block: Sequence[Prediction] = ()
        self.place: int | None = None
        self._children: dict[int, Node] = {}

    def child(self, token_id: int) -> Node:
        """Return the child with a token, creating it if necessary."""
        node = self._children.get(token_id)
        if node is None:
            node = self._children[token_id] = Node(token_id, self.position + 1, self)
        return node

    def find(self, token_id: int) -> Node | None:
        """Return the child with a token, if there is one."""
        return self._children.get(token_id)

    def path(self) -> list[Node]:
        """Return the nodes from the root (exclusive) down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def clear(self) -> list[Node]:
        """Drop the parent, the prediction and the children; return the children."""
        children = list(self._children.values())
        self.prediction, self.block, self.parent, self._children = None, (), None, {}
        return children

    def below(self) -> Iterator[Node]:
        """Yield all nodes below, each after its parent."""
        waiting = list(self._children.values())
        for node in waiting:
            yield node
            waiting.extend(node._children.values())


class SpeculationTree:
    """The tree below one session's committed tokens, and where the engine's cache holds its nodes.

    The engine holds a chain (the committed tokens, then the tokens drafted one by one) and, in addition to
    it, tree nodes in the order in which they were fed.
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        self.chain_length = 0
        self.off_chain: list[Node] = []

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

    def feeds_chain(self, nodes: Sequence[Node]) -> bool:
        """Whether feeding these nodes extends the engine's chain, which is the cheapest feed."""
        parent = nodes[0].parent
        assert parent is not None
        is_tip = parent.place == IN_CHAIN and parent.position == self.chain_length - 1
        return len(nodes) == 1 and not self.off_chain and is_tip

    def parents_of(self, nodes: Sequence[Node]) -> list[int]:
        """Return the engine's index of each node's parent: a tree index, or negative from the chain's end."""
        parents = []
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert parent.place is not None
            in_chain = parent.place == IN_CHAIN
            parents.append(parent.position - self.chain_length if in_chain else parent.place)
        return parents

    def fed(self, nodes: Sequence[Node]) -> None:
        """Note that these nodes were fed; the root alone: the committed tokens, and nothing after them."""
        if nodes[0] is self.root:
            self.root.place, self.chain_length, self.off_chain = IN_CHAIN, self.base, []
        elif self.feeds_chain(nodes):
            nodes[0].place = IN_CHAIN
            self.chain_length += 1
        else:
            for node in nodes:
                node.place = len(self.off_chain)
                self.off_chain.append(node)

    def clear(self) -> None:
        """Break the reference cycles of all nodes, so that their memory is freed at once."""
        _clear_except(self.root, None)

    def move_root(self, root: Node) -> tuple[int, list[int], list[int]] | None:
        """Make a fed node the root; nodes not below it are dropped.

        Returns:
            How the engine's nodes must move: the base and path that become chain, and the tree nodes that are
            kept; None when no node moves.
        """
        dropped, line = self.root, root.path()
        is_in_chain = root.place == IN_CHAIN
        root.parent, self.root = None, root
        _clear_except(dropped, root)
        if not self.off_chain:
            return None
        line += _main_line(root)
        moving = [node for node in line if node.place != IN_CHAIN]
        base = self.chain_length
        if moving and not is_in_chain:
            base = moving[0].position  # the chain continues with other tokens from here
        elif moving and moving[0].position < base:
            moving = []  # the chain continues past the start of the line: both stay
        path = _places(moving)
        kept = sorted(set(_places(root.below())) - set(path))
        self.off_chain = [self.off_chain[place] for place in kept]
        for node in moving:
            node.place = IN_CHAIN
        for place, node in enumerate(self.off_chain):
            node.place = place
        self.chain_length = base + len(path)
        return base, path, kept


def _clear_except(root: Node, kept: Node | None) -> None:
    """Break the reference cycles of a node and all below it, except for a node and all below that."""
    waiting = [root]
    for node in waiting:
        if node is not kept:
            waiting += node.clear()


def _main_line(root: Node) -> list[Node]:
    """The fed nodes of the draft's own choices below a node."""
    line, node, base = [], root, root.position + 1
    while node.prediction is not None:
        following = node.find(node.prediction.choose(base))
        if following is None or following.place is None:
            break
        line.append(following)
        node = following
    return line


def _places(nodes: Iterable[Node]) -> list[int]:
    """The tree places of these nodes, without those in the chain."""
    return [node.place for node in nodes if node.place is not None and node.place != IN_CHAIN]
