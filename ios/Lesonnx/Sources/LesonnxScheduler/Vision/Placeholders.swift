// The text that stands for pictures in a prompt. Pure; golden vectors in tests/data/vision.json hold it to Python's.

extension VisionRecord {
    /// A text with one placeholder a picture -> the same with its marks, and one placeholder an image token. `pictures`: the views of
    /// each. Throws `input` for any other number of placeholders.
    public func expand(_ text: String, _ pictures: [[PictureView]]) throws(LesonnxError) -> String {
        // By bytes: Swift's characters would join a placeholder's end and what stands behind it.
        let pieces = split(Array(text.utf8), by: Array(texts.placeholder.utf8))
        if pieces.count - 1 != pictures.count {
            func counted(_ count: Int, _ what: String) -> String { "\(count) \(what)\(count == 1 ? "" : "s")" }
            throw .input(
                "the prompt has \(counted(pieces.count - 1, "placeholder")) '\(texts.placeholder)' for "
                    + "\(counted(pictures.count, "picture")), expected one a picture")
        }
        var expanded = pieces[0]
        for (number, views) in pictures.enumerated() {
            expanded += expansion(of: views, number: number).utf8 + pieces[number + 1]
        }
        return String(decoding: expanded, as: UTF8.self)
    }

    /// A message with pictures before its text, as the chat template has them. Throws `input` where the bundle does not say how.
    public func message(_ text: String, numPictures: Int) throws(LesonnxError) -> String {
        if numPictures == 0 {
            return text
        }
        guard let separator = texts.separator else {
            throw .input("this bundle does not say how pictures stand in a chat; use generate")
        }
        return String(repeating: texts.placeholder + separator, count: numPictures) + text
    }

    /// The text with a placeholder a picture in front, each followed by the separator, where it has none of its own.
    public func withPlaceholders(_ text: String, numPictures: Int) -> String {
        hasPlaceholder(text) ? text : String(repeating: texts.placeholder + (texts.separator ?? "\n"), count: numPictures) + text
    }

    /// Whether a text has the mark of a picture.
    public func hasPlaceholder(_ text: String) -> Bool {
        split(Array(text.utf8), by: Array(texts.placeholder.utf8)).count > 1
    }

    /// What stands for the picture of that number, seen as these views.
    public func expansion(of views: [PictureView], number: Int) -> String {
        func crop(_ view: PictureView) -> String {
            String(repeating: texts.placeholder, count: tokens(view).height * tokens(view).width)
        }
        var text = ""
        if let idStart = texts.idStart, let idEnd = texts.idEnd {
            text = idStart + String(number) + idEnd
        }
        text += texts.imageStart + crop(views[0]) + texts.imageEnd
        if views.count > 1 {
            let slice = texts.sliceStart + crop(views[1]) + texts.sliceEnd
            let row = String(repeating: slice, count: views[1].grid.width)
            text += Array(repeating: row, count: views[1].grid.height).joined(separator: texts.rowEnd)
        }
        return text
    }
}

/// The pieces between the places where `mark` stands, from the left.
private func split(_ text: [UInt8], by mark: [UInt8]) -> [[UInt8]] {
    var pieces: [[UInt8]] = []
    var (start, at) = (0, 0)
    while at + mark.count <= text.count {
        if text[at] == mark[0] && text[at..<at + mark.count].elementsEqual(mark) {
            pieces.append(Array(text[start..<at]))
            at += mark.count
            start = at
        } else {
            at += 1
        }
    }
    return pieces + [Array(text[start...])]
}
