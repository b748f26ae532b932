"""OpenVLA-OFT: network, preprocessing, action tokens, checkpoint layout."""
