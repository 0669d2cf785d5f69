"""Local HTTP API and dashboard. Sees the node only through `web.view.NodeView`."""
