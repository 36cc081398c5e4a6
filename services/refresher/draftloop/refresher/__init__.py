"""draftloop.refresher"""
